# A worker with vLLM on an NVIDIA GPU. The wheels bring CUDA; the host brings the driver and the container toolkit.
# Build from the repository's root: docker build -f ops/docker/cuda.Dockerfile .
FROM python:3.11-slim
# vLLM compiles small kernels at first use.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/crossfill
COPY pyproject.toml README.md LICENSE ./
COPY pipeline pipeline
RUN pip install --no-cache-dir ".[vllm]" && useradd --system --uid 10001 --create-home crossfill
ENV HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
USER 10001
ENTRYPOINT ["crossfill"]
CMD ["worker", "--name", "cuda-1", "--engine", "vllm", "--model", "/models/model"]
