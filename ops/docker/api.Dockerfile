# The HTTP edge: no engine, no GPU. Build from the repository's root: docker build -f ops/docker/api.Dockerfile .
FROM python:3.11-slim
WORKDIR /opt/crossfill
COPY pyproject.toml README.md LICENSE ./
COPY pipeline pipeline
RUN pip install --no-cache-dir . && useradd --system --uid 10001 crossfill
USER 10001
EXPOSE 8000
HEALTHCHECK --start-period=30s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["crossfill"]
CMD ["serve", "--model", "/models/model", "--host", "0.0.0.0", "--port", "8000"]
