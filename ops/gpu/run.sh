#!/usr/bin/env bash
# Runs the system end to end on a machine with an NVIDIA GPU and leaves JSON: ops/gpu/run.sh PIECE [RESULTS [OPTION ...]]
#
#   checkpoint   write the random checkpoint (Qwen2.5-0.5B dimensions) to $MODEL, once
#   tests        the engine contract suite and vLLM's own tests, on the GPU
#   copies       device time of moving KV pages out of and into vLLM's blocks      gpu-copies.json
#   ring         the same for SGLang's pool and the page ring                      gpu-copies-sglang.json
#   pairs        text of all directions against each engine alone                  gpu-pairs-A-B.json
#   ttft         TTFT of each engine alone and of all directions                   gpu-ttft-A-B.json
#   turns        a chat of ten turns, and the second turn of a long one            gpu-turns-A-B.json
#   load         16 clients: tokens/s against D alone and vLLM's own server         gpu-load-A-B.json
#   links        the prefill engine behind 85 MB/s and 1 Gb/s                       gpu-links-A-B.json
#   soak         500 requests, a fifth cancelled in every phase                    gpu-soak-A-B.json
#   killed       P is killed while its pages cross (needs --at and --victim)       gpu-killed-A-B.json
#   oom          a KV pool larger than the GPU: what is said, and is it given back
#
# Each piece ends within nine minutes. ENGINES (default "vllm,mlx") names the engines. An engine with packages in a folder
# of its own is named by CROSSFILL_SITE_<ENGINE>; /tmp/site-<engine> is taken when it is there. pairs, ttft and soak take
# a system that runs already with `--at RUN.json` (see ops/gpu/system.py). Without a GPU they run too, with MODEL a tiny
# checkpoint and smaller numbers: `--kv-mib 64 --budget-mib 4 --requests 60`.
set -euo pipefail
cd "$(dirname "$0")/../.."
piece=$1 results=${2:-bench/results}
export MODEL=${MODEL:-/tmp/qwen2.5-0.5b-random} ENGINES=${ENGINES:-vllm,mlx}
export HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
for engine in vllm mlx sglang; do
  name=CROSSFILL_SITE_${engine^^}
  if [ -z "${!name:-}" ] && [ -d "/tmp/site-$engine" ]; then export "$name=/tmp/site-$engine"; fi
done
base=${PYTHONPATH:-}
[ -d /tmp/site-core ] && base=/tmp/site-core${base:+:$base}
export PYTHONPATH=$base
with_vllm() { PYTHONPATH=$PWD:${CROSSFILL_SITE_VLLM:-}:$base OMP_NUM_THREADS=1 "$@"; }
mkdir -p "$results"
pair=${ENGINES//,/-}
case $piece in
  checkpoint) [ -e "$MODEL/config.json" ] || python3 -m ops.gpu.checkpoint "$MODEL" ;;
  tests) CROSSFILL_REQUIRE_ENGINES=vllm with_vllm timeout 500 python3 -m pytest -q -W ignore -p no:cacheprovider \
           tests/engines/test_contract.py tests/engines/test_contract_ends.py tests/engines/vllm -k "vllm or own or shared or cuda" \
           2>&1 | tee "$results/gpu-tests.txt" | tail -40 ;;
  copies) with_vllm python3 -m ops.gpu.copies "$MODEL" "$results/gpu-copies.json" "${@:3}" ;;
  ring) python3 -m ops.gpu.ring "$results/gpu-copies-sglang.json" ;;
  pairs | ttft | turns | load | links | soak | killed)
    python3 -m "ops.gpu.$piece" "$MODEL" "$results/gpu-$piece-$pair.json" --engines "$ENGINES" "${@:3}" ;;
  oom) python3 -m ops.gpu.oom "$MODEL" ${ENGINES//,/ } ;;
  *) echo "unknown piece $piece" >&2; exit 2 ;;
esac
