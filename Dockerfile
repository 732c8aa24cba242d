# docker build -t interdomain .
# docker run --gpus all -v "$PWD/data:/interdomain/data" -v "$PWD/outputs:/interdomain/outputs" interdomain train_configs/125M.toml
#
# The arguments of a container are those of ./launch.sh. PyTorch's wheels bring CUDA's libraries, so BASE needs none of them;
# for a CPU alone, a smaller image: --build-arg INDEX=https://download.pytorch.org/whl/cpu
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG INDEX=
ENV PIP_EXTRA_INDEX_URL=${INDEX}
# A compiler and Python's headers: Triton builds small C programs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ git python3-dev python3-venv \
    && apt-get clean
WORKDIR /interdomain
COPY . .
RUN ./launch.sh --flags > /dev/null
ENTRYPOINT ["./launch.sh"]
