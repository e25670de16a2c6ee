#!/usr/bin/env bash
# Runs the suite on one node of an MPIJob; mpirun starts it once on each. The arguments are pytest's.
#
#   OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE   this node's number, and how many there are: mpirun's
#   MASTER_ADDR, GPUCLUSTER_REPORT_DIR           the launcher's, by `mpirun -x`
#   PET_NPROC_PER_NODE, GPUCLUSTER_*, NCCL_*     this pod's own, from the file that worker.sh has left
#
# Node 0 leaves its exit code for launcher.sh in the file that EXIT_CODE_FILE names, and before that its process number in
# the one of NODE_PID_FILE.
set -uo pipefail

fail() {
  echo "node.sh: $1" >&2
  exit 11
}

# An end that is not the suite's own is 11, BROKEN: bash's own 1, as of ${NAME:?}, would say REJECTED.
master=${MASTER_ADDR:-}
report=${GPUCLUSTER_REPORT_DIR:-}
rank=${OMPI_COMM_WORLD_RANK:-}
nodes=${OMPI_COMM_WORLD_SIZE:-}
[[ -n $rank && -n $nodes ]] || fail "OMPI_COMM_WORLD_RANK or OMPI_COMM_WORLD_SIZE is not set: mpirun starts this"
[[ -n $master && -n $report ]] || fail "MASTER_ADDR or GPUCLUSTER_REPORT_DIR is not set: launcher.sh names them"
environment=${POD_ENVIRONMENT:-/tmp/pod-environment}
[[ -r $environment ]] || fail "$(hostname): $environment is not there: has worker.sh started this pod?"
# shellcheck disable=SC1090 # this pod's own
source "$environment" || fail "$(hostname): $environment cannot be read"
export MASTER_ADDR=$master GPUCLUSTER_REPORT_DIR=$report
# suite.sh asks it whether this is node 0.
export PET_NODE_RANK=$rank

scripts=${SUITE_SCRIPTS:-/opt/gpucluster-scripts}
cd "${SUITE_FOLDER:-/opt/pytest-gpucluster}" || fail "$(hostname): no ${SUITE_FOLDER:-/opt/pytest-gpucluster}"
run=""
heard=""

# shellcheck disable=SC2329 # by the trap
stop() {
  heard=yes
  [[ -z $run ]] || kill -TERM "$run" 2>/dev/null
}
trap stop TERM INT

# A pipe, because mpirun gives it a terminal: the log of a pod is no place for a line that is drawn again and again.
bash "$scripts/suite.sh" --nnodes="$nodes" --node-rank="$rank" --master-addr="$master" \
  --master-port="${MASTER_PORT:-29500}" --rdzv-conf=timeout=1800 -- "$@" --junitxml="$report/report.xml" > >(cat) 2>&1 &
run=$!
if [[ $rank == 0 ]]; then
  printf '%s\n' "$$" >"${NODE_PID_FILE:-/tmp/node-pid}"
fi
while true; do
  heard=""
  wait "$run"
  code=$?
  [[ -n $heard ]] || break
done

if [[ $rank == 0 ]]; then
  printf '%s\n' "$code" >"${EXIT_CODE_FILE:-/tmp/exit-code}" || fail "$(hostname): the exit code $code could not be kept"
elif ((code != 0)); then
  # mpirun kills all nodes within seconds when one has ended badly. Node 0 has to find out what happened and to write the
  # reports, so it must end first; mpirun's SIGTERM then ends this.
  run=""
  sleep "${LET_FIRST_END_SECONDS:-900}" &
  wait "$!"
fi
exit "$code"
