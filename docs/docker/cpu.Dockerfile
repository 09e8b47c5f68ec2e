# fftune on a CPU: the tool and the library from Debian packages, built here from the source tree.
#   docker build -f docs/docker/cpu.Dockerfile -t fftune .
#   docker run --rm -v "$PWD/presets:/presets" -w / fftune ffn --d 1024 --h 2048
FROM debian:bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends git dpkg-dev \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
WORKDIR /source
RUN ./dev package

FROM debian:bookworm-slim
COPY --from=build /source/dist/*.deb /packages/
RUN apt-get update \
    && apt-get install -y --no-install-recommends libopenblas0-pthread \
       /packages/fftune_*.deb /packages/libfftune0*.deb /packages/libfftune-dev_*.deb \
    && rm -rf /var/lib/apt/lists/* /packages
# Compiled kernels and journals outlive the container where a volume is mounted here.
ENV FFTUNE_CACHE=/var/cache/fftune XDG_STATE_HOME=/var/lib/fftune/state \
    XDG_DATA_HOME=/var/lib/fftune/data
RUN mkdir -p -m 0700 /var/cache/fftune /var/lib/fftune/state /var/lib/fftune/data
VOLUME ["/var/cache/fftune", "/var/lib/fftune"]
ENTRYPOINT ["fftune"]
CMD ["--help"]
