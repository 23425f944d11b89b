#!/usr/bin/env bash
# Installs megarlhf from /opt/megarlhf into /opt/venv, inside an image of Ubuntu 24.04. MAX_JOBS: compilers at once.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update
# NCCL opens the libraries of InfiniBand where they are there.
apt-get install -y --no-install-recommends ca-certificates g++ git make python3.12-dev python3.12-venv \
    ibverbs-providers libibverbs1 librdmacm1t64
rm -rf /var/lib/apt/lists/*
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
make -C /opt/megarlhf venv-gpu VENV_GPU=/opt/venv PYTHON=python3.12
/opt/venv/bin/python -m pip show --quiet transformer-engine-torch # an image without it would only be slower
