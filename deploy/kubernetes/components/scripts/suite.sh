#!/usr/bin/env bash
# Runs the suite in a pod and reports the result. The arguments are those of `gpucluster run`; its exit code is the
# pod's.
#
#   GPUCLUSTER_REPORT_DIR   where the run leaves its folder: one of its own for each Job
#   JOB_COMPLETION_INDEX    this pod's number, else PET_NODE_RANK, else 0. Pod 0 has the record and reports the verdict
#   MASTER_ADDR             whose name must be known before the ranks can meet; if unset, there is no wait
#   SUITE_SOURCE            a script of the provider that sets variables, read before anything runs
#   SUITE_LOCK              a file that is locked for as long as this runs: keep.sh waits for it
#
# An end that is not the suite's own is exit code 11, BROKEN, never 1: bash's own 1 would mean REJECTED.
set -uo pipefail

answer=${TERMINATION_LOG:-/dev/termination-log}
report=${GPUCLUSTER_REPORT_DIR:-}
node=${JOB_COMPLETION_INDEX:-${PET_NODE_RANK:-0}}
name_tries=${NAME_TRIES:-150}
run=""
heard=""

say() {
  printf '%s\n' "$1"
  # What Kubernetes keeps of a termination message.
  printf '%s\n' "$1" | head -c 4096 >"$answer" || echo "gpucluster: $answer cannot be written to" >&2
}

broken() {
  say "gpucluster: BROKEN, exit code 11: $1"
  exit 11
}

# Passed on to the run, which writes its reports then. Before there is one, there is nothing to write.
# shellcheck disable=SC2317,SC2329 # the trap calls it
stop() {
  heard=yes
  if [[ -n $run ]]; then
    kill -TERM "$run" 2>/dev/null
  else
    say "gpucluster: BROKEN, exit code 2: stopped before the suite has begun"
    exit 2
  fi
}
trap stop TERM INT

if [[ -n ${SUITE_SOURCE:-} ]]; then
  [[ -r $SUITE_SOURCE ]] || broken "SUITE_SOURCE $SUITE_SOURCE cannot be read: is the provider's folder mounted?"
  set +u
  # shellcheck disable=SC1090 # the provider's
  source "$SUITE_SOURCE" || broken "SUITE_SOURCE $SUITE_SOURCE ended with $?"
  set -u
fi
command -v gpucluster >/dev/null || broken "there is no gpucluster in this image: build it from deploy/docker"
python -c '' || broken "python does not run in this image: see the line above"
[[ -n $report ]] || broken "GPUCLUSTER_REPORT_DIR is not set: name a folder on the volume of the reports"
mkdir -p "$report" || broken "$report cannot be made by user $(id -u): let the volume belong to the pod's fsGroup"
if [[ -n ${SUITE_LOCK:-} ]]; then
  exec 9>"$SUITE_LOCK" || broken "SUITE_LOCK $SUITE_LOCK cannot be written to"
  flock --nonblock 9 || broken "SUITE_LOCK $SUITE_LOCK is held by another pod: the volume must be this pod's alone"
  echo "locked" >&9
fi

# The cluster's DNS knows a pod only some time after it has its address.
if [[ -n ${MASTER_ADDR:-} ]]; then
  tries=0
  until python -c 'import socket, sys; socket.getaddrinfo(sys.argv[1], None)' "$MASTER_ADDR" 2>/dev/null; do
    tries=$((tries + 1))
    ((tries < name_tries)) || broken "no address of $MASTER_ADDR: is its pod running, and is the headless service there?"
    sleep 2 &
    wait "$!"
  done
fi

gpucluster run "$@" 9>&- &
run=$!
status=0
while true; do
  heard=""
  wait "$run"
  status=$?
  # A signal ends the wait, not the run. A second wait returns the code, also of a process that has ended by then.
  [[ -n $heard ]] || break
done
case $status in
  0 | 1 | 2 | 3 | 4 | 5 | 10 | 11 | 12) why="" ;;
  *) why="gpucluster: BROKEN, exit code 11: gpucluster run ended with $status (137 is SIGKILL: out of memory?)" ;;
esac

line="gpucluster: exit code $status; pod 0 reports the verdict"
if [[ $node == 0 ]]; then
  gpucluster report "$report" --text - --all "$report/latest" 9>&- ||
    echo "gpucluster: not all reports could be rendered again" >&2
  line=$(gpucluster verdict "$report" 2>&1 9>&-)
  verdict=$?
  # What the run reports must stand in its record.
  if ((status == 0 && verdict != 0)); then
    why="gpucluster: BROKEN, exit code 11: the run ended with 0, and its record says otherwise: $line"
  fi
fi
if [[ -n $why ]]; then
  status=11
  line=$why
fi
say "$line"
exit "$status"
