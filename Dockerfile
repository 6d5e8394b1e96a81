# EPS on a CPU: the demo, the tests and all commands, with the versions of constraints.txt.
#   docker build -t eps . && docker run --rm eps
#   docker run --rm eps scripts/test.sh tests      (the suite; without "tests" the engines' own, which are downloaded)
# The Python that the published measurements were made with.
FROM python:3.11.7-slim-bookworm

# g++ compiles Metal's text for the tests. Debian keeps one version of a package, so none can be named for long.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 eps
USER 10001
WORKDIR /home/eps/eps
COPY --chown=10001 . .

# Torch's CPU build, a tenth of the one with CUDA
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_NO_CACHE_DIR=1
# both sets that scripts ask for, so that they find them here
RUN scripts/setup.sh mlx,cuda,dev && scripts/setup.sh
ENV PATH=/home/eps/eps/.venv/bin:$PATH
CMD ["scripts/demo.sh"]
