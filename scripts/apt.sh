#!/usr/bin/env bash
# What some tests need from the system: mpirun. Does nothing when it is there, or when it cannot be installed here;
# the tests that need it then say that they were skipped, and why.
set -euo pipefail

command -v mpirun > /dev/null && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
  echo "mpirun is missing and cannot be installed from here (needs root and apt-get); its tests will be skipped."
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
echo "Installing openmpi-bin (about a minute)"
(apt-get install --yes --quiet --no-install-recommends openmpi-bin ||
  (apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends openmpi-bin)) > /dev/null ||
  echo "openmpi-bin could not be installed; the tests that need mpirun will be skipped."
