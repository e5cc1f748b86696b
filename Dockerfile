# A SuperNode with CUDA:
#   docker build -t flower-blsgd .
#   docker run --gpus all --shm-size 8g --network host \
#       -v $PWD/tls:/tls:ro -v $PWD/data:/data:ro flower-blsgd \
#       --superlink HOST:PORT --root-certificates /tls/ca.crt \
#       --auth-supernode-private-key /tls/node-1 --workers "1x cuda:0 fast"
# DataLoader processes (loader-workers) send batches through /dev/shm, where Docker allows 64 MB unless
# --shm-size says more; a "bus error" of a DataLoader worker means that it is full.
# User 10001 must be able to read the key: chown 10001 tls/node-1
ARG IMAGE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
FROM ${IMAGE}

RUN useradd --create-home --uid 10001 node
WORKDIR /home/node/app
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY flower_blsgd flower_blsgd
COPY clients clients
COPY server server
COPY configs configs
# torch is that of the image; constraints.txt pins the rest.
RUN grep -v '^torch' constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir --break-system-packages -c /tmp/constraints.txt '.[vision,text,lora]'

USER 10001
WORKDIR /home/node
ENTRYPOINT ["blsgd", "supernode"]
