#!/usr/bin/env bash
# A worker of an MPIJob: keeps this pod's environment for node.sh, which mpirun starts through ssh and so without it,
# and serves mpirun's ssh.
set -euo pipefail

environment=${POD_ENVIRONMENT:-/tmp/pod-environment}
umask 077
(
  # mpirun sets these for its own processes.
  for name in $(compgen -e); do
    case $name in
      OMPI_* | PMIX_* | PRTE_* | PWD | OLDPWD | SHLVL | _) unset "$name" ;;
    esac
  done
  export -p >"$environment"
)
# orted must be found, too.
exec "${SSHD:-/usr/sbin/sshd}" -D -e -f /etc/ssh/gpucluster_sshd_config \
  -o "SetEnv PATH=$PATH LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}"
