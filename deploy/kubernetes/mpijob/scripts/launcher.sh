#!/usr/bin/env bash
# The launcher of an MPIJob, which is node 0 as well: starts the suite on every node by mpirun, and ends with the suite's
# own exit code. The arguments are pytest's.
#
# mpirun's exit code is not the suite's: its own failures are 1, too, which would read as REJECTED. So node 0, which is in
# this pod, leaves its code in a file; without it the end is 11, BROKEN. And where node 0 says 0, mpirun must, too.
set -uo pipefail

hostfile=${HOSTFILE:-/etc/mpi/hostfile}
scripts=${MPI_SCRIPTS:-/opt/gpucluster-mpi}
environment=${POD_ENVIRONMENT:-/tmp/pod-environment}
export EXIT_CODE_FILE=${EXIT_CODE_FILE:-/tmp/exit-code} NODE_PID_FILE=${NODE_PID_FILE:-/tmp/node-pid}
answer=${TERMINATION_LOG:-/dev/termination-log}
name_tries=${NAME_TRIES:-150}
run=""
heard=""

broken() {
  printf '%s\n' "gpucluster: BROKEN, exit code 11: $1" | tee "$answer"
  exit 11
}

# shellcheck disable=SC2329 # by the trap
stop() {
  heard=yes
  if [[ -n $run && -s $NODE_PID_FILE ]]; then
    # Not mpirun, which would give the nodes one second: node 0 ends the run, and writes its reports.
    kill -TERM "$(<"$NODE_PID_FILE")" 2>/dev/null
  elif [[ -n $run ]]; then
    kill -TERM "$run" 2>/dev/null
  else
    printf '%s\n' "gpucluster: BROKEN, exit code 2: stopped before the suite has begun" | tee "$answer"
    exit 2
  fi
}
trap stop TERM INT

command -v mpirun >/dev/null || broken "there is no mpirun in this image: build it from deploy/docker"
[[ -r $hostfile ]] || broken "$hostfile is not there: the MPI operator makes it, has it started this pod?"
mapfile -t hosts < <(sed -E 's/#.*//; s/^[[:space:]]+//; s/[[:space:]:].*//; /^$/d' "$hostfile")
((${#hosts[@]})) || broken "$hostfile names no host"
export MASTER_ADDR=${hosts[0]}
[[ -n ${GPUCLUSTER_REPORT_DIR:-} ]] || broken "GPUCLUSTER_REPORT_DIR is not set: name a folder on the volume of the reports"

# The cluster's DNS knows a pod only some time after it has its address. mpirun would take this pod for another one.
for host in "${hosts[@]}"; do
  tries=0
  until python -c 'import socket, sys; socket.getaddrinfo(sys.argv[1], None)' "$host" 2>/dev/null; do
    tries=$((tries + 1))
    ((tries < name_tries)) || broken "no address of $host: is its pod running?"
    sleep 2 &
    wait "$!"
  done
done

rm -f "$EXIT_CODE_FILE" "$NODE_PID_FILE"
(
  umask 077
  export -p >"$environment"
) || broken "$environment cannot be written"

# Open MPI 4 reads OMPI_MCA_*, Open MPI 5 PRTE_MCA_*.
export OMPI_MCA_orte_keep_fqdn_hostnames=true PRTE_MCA_prte_keep_fqdn_hostnames=true
# By its whole path: then it finds its own programs on the other nodes as well. Bound to nothing: what mpirun starts here
# is torchrun, and all ranks of the node would share its one core.
"$(command -v mpirun)" --hostfile "$hostfile" -np "${#hosts[@]}" --map-by ppr:1:node --bind-to none \
  -x MASTER_ADDR -x GPUCLUSTER_REPORT_DIR bash "$scripts/node.sh" "$@" &
run=$!
while true; do
  heard=""
  wait "$run"
  status=$?
  [[ -n $heard ]] || break
done

[[ -s $EXIT_CODE_FILE ]] || broken "mpirun ended with $status, and node 0 left no exit code: see above"
code=$(<"$EXIT_CODE_FILE")
[[ $code =~ ^[0-9]{1,3}$ ]] || broken "$EXIT_CODE_FILE holds no exit code"
((code != 0 || status == 0)) || broken "node 0 ended with 0, and mpirun with $status: another node failed, see above"
exit "$code"
