# A worker with MLX on a CPU, and the reference engine: to try things out, and for tests.
# Build from the repository's root: docker build -f ops/docker/cpu.Dockerfile .
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/crossfill
COPY pyproject.toml README.md LICENSE ./
COPY pipeline pipeline
COPY ops/cpu ops/cpu
# The shim makes MLX's products on a CPU fast; machine.py of `crossfill up` would preload it just the same.
RUN pip install --no-cache-dir ".[mlx]" && python ops/cpu/build_blas_shim.py && useradd --system --uid 10001 crossfill
ENV LD_PRELOAD=/usr/local/lib/crossfill_blas.so HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
USER 10001
ENTRYPOINT ["crossfill"]
CMD ["worker", "--name", "cpu-1", "--engine", "mlx", "--model", "/models/model"]
