# NVIDIA: docker build -f docker/cuda.Dockerfile -t lantern_hpu:cuda .
# Of a version: --build-arg VERSION=0.5.0 -t lantern_hpu:0.5.0-cuda
#
# Whether this version of lantern_hpu uses the GPU, `doctor` says.
ARG BASE=pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime
FROM ${BASE}

# Triton builds its kernels' launchers with a C compiler and Python's headers, and the native decoder is C; without
# them plain kernels serve, as `doctor` would say.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

ENV XDG_CACHE_HOME=/cache HOME=/cache USER=lantern PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /opt/lantern_hpu
COPY . .

# No constraints.txt: it names a torch, and pip would replace the base's. The build fails if that happens all the same.
RUN torch='from importlib.metadata import version; print(version("torch"))' \
    && before="$(python3 -c "$torch")" \
    && python3 -m pip install --no-cache-dir '.[models,serve]' \
    && after="$(python3 -c "$torch")" \
    && { [ "$before" = "$after" ] || { echo "pip replaced torch $before with $after" >&2; exit 1; }; }

# Not root, whose files and devices a fault would open. Any user may take its place: docker run --user "$(id -u):$(id -g)"
RUN install -d -m 1777 /cache /out
USER 1000:1000
WORKDIR /out
ARG VERSION=unreleased
LABEL org.opencontainers.image.version=${VERSION} org.opencontainers.image.licenses=Apache-2.0
ENTRYPOINT ["python3", "-m", "lantern_hpu"]
CMD ["doctor"]
