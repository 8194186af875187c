# Processors: docker build -f docker/cpu.Dockerfile -t lantern_hpu:cpu .
# Of a version: --build-arg VERSION=0.5.0 -t lantern_hpu:0.5.0-cpu
#
#     docker run --rm -v "$PWD:/out" --user "$(id -u):$(id -g)" lantern_hpu:cpu generate --prompt "a red apple" --output apple.png
ARG BASE=python:3.12-slim
FROM ${BASE}

# The native decoder is C; without a compiler torch's form serves, as `doctor` would say.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

ENV XDG_CACHE_HOME=/cache HOME=/cache USER=lantern
WORKDIR /opt/lantern_hpu
COPY . .

# The base has no torch: that of constraints.txt, built for processors alone.
RUN python3 -m pip install --no-cache-dir -c constraints.txt '.[models,serve]' \
    --extra-index-url https://download.pytorch.org/whl/cpu

# Not root, whose files a fault would open. Any user may take its place: docker run --user "$(id -u):$(id -g)"
RUN install -d -m 1777 /cache /out
USER 1000:1000
WORKDIR /out
ARG VERSION=unreleased
LABEL org.opencontainers.image.version=${VERSION} org.opencontainers.image.licenses=Apache-2.0
ENTRYPOINT ["python3", "-m", "lantern_hpu"]
CMD ["doctor"]
