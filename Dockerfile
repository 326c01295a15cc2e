# Two images from one file:
#   docker build --target operator --tag finetune-operator .
#   docker build --target trainer --tag finetune-trainer .
# A base by digest:  --build-arg BASE_IMAGE=docker.io/library/python@sha256:...
# torch for CPUs:    --build-arg TORCH=torch-cpu --build-arg PIP_EXTRA_INDEX_URL=... (an index with its wheel)
# torch for V100:    --build-arg TORCH=torch-cuda12, not built by the project: docs/operations/installation.md#gpus
# pip installs only artefacts whose sha256 is in requirements/, so that no index, extra index or folder is trusted.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG TORCH=torch

# The user of both images, and where their Python is.
FROM ${BASE_IMAGE} AS base
RUN echo 'finetune:x:1000:1000::/home/finetune:/bin/sh' >> /etc/passwd && echo 'finetune:x:1000:' >> /etc/group \
 && mkdir -p /home/finetune && chown 1000:1000 /home/finetune
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin HOME=/home/finetune PYTHONUNBUFFERED=1
WORKDIR /home/finetune

# Both secrets may be absent: settings of pip (an index, a proxy) and certificates that they name.
# Compiled apart from pip because it uses one core only; some packages hold templates that cannot compile.
FROM base AS operator-dependencies
ARG PIP_EXTRA_INDEX_URL=
COPY requirements/operator.txt /opt/requirements/
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=certificates \
    python3 -m venv /opt/venv && export PIP_CONFIG_FILE=/run/secrets/pip.conf PIP_NO_CACHE_DIR=1 \
 && pip install --no-compile --require-hashes --only-binary :all: -r /opt/requirements/operator.txt \
 && pip uninstall --yes pip setuptools && (python -m compileall -qq -j 0 /opt/venv || true)

# NCCL opens the RDMA libraries at run time and falls back to TCP without a message if they are missing. Triton compiles
# a C extension per kernel launcher, so it needs gcc, the C library's headers and Python.h, which a Python from a Debian
# package does not contain. The three secrets may be absent: apt's settings (a proxy, a mirror) and certificates.
FROM base AS system-torch
RUN --mount=type=secret,id=apt.conf --mount=type=secret,id=sources.list --mount=type=secret,id=certificates \
    export DEBIAN_FRONTEND=noninteractive PATH="$PATH:/usr/sbin:/sbin" \
 && if test -e /run/secrets/apt.conf; then export APT_CONFIG=/run/secrets/apt.conf; fi \
 && header="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
 && apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends \
    libibverbs1 ibverbs-providers librdmacm1 libnuma1 gcc libc6-dev $(test -e "$header" || echo libpython3-dev) \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log

FROM system-torch AS system-torch-cuda12

# torch for CPUs uses none of them.
FROM base AS system-torch-cpu

# deepspeed has no wheel: it is built with the locked setuptools, not with one that build isolation would install.
FROM system-${TORCH} AS trainer-dependencies
ARG PIP_EXTRA_INDEX_URL=
ARG TORCH
COPY requirements/setuptools.txt requirements/trainer.txt requirements/${TORCH}.txt /opt/requirements/
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=certificates \
    python3 -m venv /opt/venv && export PIP_CONFIG_FILE=/run/secrets/pip.conf PIP_NO_CACHE_DIR=1 \
 && pip install --no-compile --require-hashes -r /opt/requirements/setuptools.txt \
 && pip install --no-compile --require-hashes --no-build-isolation --use-pep517 \
    -r /opt/requirements/trainer.txt -r /opt/requirements/${TORCH}.txt \
 && pip uninstall --yes pip setuptools && (python -m compileall -qq -j 0 /opt/venv || true)

# The project's own code is a small layer on top, so that a change of it builds and loads in seconds.
FROM base AS build-backend
COPY requirements/hatchling.txt /opt/requirements/
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=certificates \
    python3 -m venv /opt/venv \
 && PIP_CONFIG_FILE=/run/secrets/pip.conf pip install --require-hashes -r /opt/requirements/hatchling.txt

FROM build-backend AS code
WORKDIR /source
COPY pyproject.toml ./
COPY operator operator
COPY trainer trainer
RUN touch README.md && pip install --no-deps --no-build-isolation --target /code . && rm -rf /code/bin \
 && mkdir /operator /trainer \
 && cp -r /code/*.dist-info /code/finetune_api /code/finetune_supervisor /code/finetune_operator /operator \
 && cp -r /code/*.dist-info /code/finetune_api /code/finetune_supervisor /code/finetune_trainer /trainer

FROM operator-dependencies AS operator
COPY --from=code /operator /opt/venv/lib/python3.11/site-packages
USER 1000:1000
ENTRYPOINT ["python", "-m", "finetune_operator"]

FROM trainer-dependencies AS trainer
COPY --from=code /trainer /opt/venv/lib/python3.11/site-packages
USER 1000:1000
# The kernel drops signals for which the process with id 1 has no handler, but not blocked ones. env blocks SIGTERM until
# the supervisor has its handler, so that a pod that is deleted while Python starts does not use its whole grace period.
ENTRYPOINT ["env", "--block-signal=TERM", "python", "-m", "finetune_supervisor"]
