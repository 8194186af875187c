# Gaudi: docker build -f docker/hpu.Dockerfile -t lantern_hpu:hpu .
# Of a version: --build-arg VERSION=0.5.0 -t lantern_hpu:0.5.0-hpu
#
# The base brings Gaudi's libraries, its plugin and its own torch. Take one of the host driver's release. For HPU graphs
# it must be a pytorch-installer-*; a pytorch-upstream-installer-* has a stock torch, for `--graphs compile`.
ARG BASE=vault.habana.ai/gaudi-docker/1.24.0/ubuntu22.04/habanalabs/pytorch-installer-2.10.0:latest
FROM ${BASE}

# Compiled recipes go to /cache: mount a volume on a local disk there, never a network disk.
# The base's HABANA_LOGS is under /var/log, and where the runtime cannot write its logs it ends the process.
ENV XDG_CACHE_HOME=/cache HOME=/cache USER=lantern HABANA_LOGS=/cache/lantern_hpu/logs \
    OMPI_MCA_btl_vader_single_copy_mechanism=none PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /opt/lantern_hpu
COPY . .

# No constraints.txt: it names a torch, and pip would replace Gaudi's. The build fails if that happens all the same.
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
