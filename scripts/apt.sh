#!/usr/bin/env bash
# What some tests need from the system: two kinds of MPI, an ssh server, a SLURM, tools to set up networks, a browser, shells.
# Does nothing when all is there. What cannot be installed here is named; the tests that need it then say that they were
# skipped, and why.
set -euo pipefail

# A command that proves the package, and the package.
needed="mpirun.openmpi:openmpi-bin mpirun.mpich:mpich ssh:openssh-client sshd:openssh-server ip:iproute2 nft:nftables
  nsenter:util-linux srun:slurm-client slurmd:slurmd slurmctld:slurmctld munged:munge chromium:chromium fish:fish zsh:zsh"
PATH="$PATH:/usr/sbin:/sbin"

missing() {
  local pair
  for pair in $needed; do
    command -v "${pair%%:*}" > /dev/null || echo "${pair##*:}"
  done
}

packages=$(missing | paste -s -d ' ')
[ -z "$packages" ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
  echo "Missing, and not to be installed from here (needs root and apt-get): ${packages}; their tests will be skipped."
  exit 0
fi

export DEBIAN_FRONTEND=noninteractive
echo "Installing ${packages} (about a minute)"
# The tests start daemons of their own; those of the packages are to stay off. Where the system has a rule of its own
# about that, it stays in force.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' > "$policy" && chmod +x "$policy" || true
fi

install() {
  apt-get install --yes --quiet --no-install-recommends "$@" > /dev/null 2>&1
}
# One by one when they do not go in together: one package that is missing must not keep the others away.
# shellcheck disable=SC2086  # one word per package
install $packages || { apt-get update --quiet > /dev/null 2>&1 && install $packages; } || {
  for package in $packages; do install "$package" || true; done
}

left=$(missing | paste -s -d ' ')
[ -z "$left" ] || echo "Not installed: ${left}; the tests that need them will be skipped."
exit 0
