# A server on a CPU. docs/guides/containers.md says how it is built and run.
FROM python:3.12-slim AS build
# For a GPU: --build-arg TORCH=2.13.0, whose wheel brings the CUDA libraries.
ARG TORCH=2.13.0+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=valkey,s3,otel
RUN python -m venv /opt/quire
ENV PATH=/opt/quire/bin:$PATH
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" "torch==$TORCH"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[$EXTRAS]"

FROM python:3.12-slim
# A compiler: the server builds its kernels for the CPU that it runs on, at its first start.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 quire && install --directory --owner=quire --group=quire --mode=700 /var/lib/quire
COPY --from=build /opt/quire /opt/quire
# Downloaded models and built kernels are kept in the volume too.
ENV PATH=/opt/quire/bin:$PATH HF_HOME=/var/lib/quire/hub XDG_CACHE_HOME=/var/lib/quire/cache
USER 1000
WORKDIR /var/lib/quire
VOLUME /var/lib/quire
# The API, /health and /metrics.
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=180s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["quire", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--storage", "/var/lib/quire/store", "--storage-size", "8GiB"]
