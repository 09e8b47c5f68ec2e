# fftune on a host with an NVIDIA GPU. The driver's libraries come from the host by the NVIDIA
# Container Toolkit; NVRTC and cuBLASLt are of the base image, and the CUDA backend is built against
# the headers of the same version.
#   docker build -f docs/docker/gpu.Dockerfile -t fftune-gpu .
#   docker run --rm --gpus all fftune-gpu check
ARG CUDA=12.8.1
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build
RUN apt-get update && apt-get install -y --no-install-recommends git dpkg-dev \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
WORKDIR /source
RUN ./dev package

# "runtime" has NVRTC and cuBLASLt; "base" has neither.
FROM nvidia/cuda:${CUDA}-runtime-ubuntu24.04
COPY --from=build /source/dist/*.deb /packages/
RUN apt-get update \
    && apt-get install -y --no-install-recommends libopenblas0-pthread \
       /packages/fftune_*.deb /packages/libfftune0*.deb /packages/libfftune-dev_*.deb \
    && rm -rf /var/lib/apt/lists/* /packages
# NVML and the driver, for clocks, disturbances and kernels.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV FFTUNE_CACHE=/var/cache/fftune XDG_STATE_HOME=/var/lib/fftune/state \
    XDG_DATA_HOME=/var/lib/fftune/data
RUN mkdir -p -m 0700 /var/cache/fftune /var/lib/fftune/state /var/lib/fftune/data
VOLUME ["/var/cache/fftune", "/var/lib/fftune"]
ENTRYPOINT ["fftune"]
CMD ["--help"]
