#!/usr/bin/env bash
# A node is checked by the suite's quick profile, on its own, and drained if it is rejected. For slurm.conf:
#
#   HealthCheckProgram=/shared/pytest-gpucluster/deploy/slurm/health-check.sh
#   HealthCheckInterval=3600
#   HealthCheckNodeState=IDLE,CYCLE
#
# or, to check after jobs, Epilog=/shared/.../health-check.sh. By hand, on an idle node: health-check.sh now
#
# It looks at nothing while jobs run: it takes an idle node out of service first, makes sure that no job has come in
# between, and gives it back when all is well. slurmd ends such a program after 60 seconds (slurm.conf(5)) and waits for
# an epilog, so what takes minutes goes on by itself, one at a time on a node, with a deadline. Before it asks Slurm
# anything it looks whether a check is due, for an epilog that calls Slurm's commands after each job is a burden to
# slurmctld.
#
# Drained stays who is REJECTED: a limit missed, a wrong result, a bad GPU. What may be the suite's or the site's own
# fault (no venv, a full disk, the deadline) is logged and tried again after RETRY_HOURS; DRAIN_ON=anything drains for
# that, too.
set -uo pipefail

# ---- The site's own values: here, or in the file that HEALTH_CHECK_CONF names ---------------------------------------
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin${SLURM_BIN:+:$SLURM_BIN}
HEALTH_CHECK_CONF=${HEALTH_CHECK_CONF:-/etc/gpucluster/health-check.conf}
SUITE_DIR=/shared/pytest-gpucluster    # the checkout
SUITE_VENV=/shared/pytest-gpucluster/.venv
STATE_DIR=/var/lib/gpucluster-health   # on the node itself: lock, time of the next check, log, reports
NODE=${SLURMD_NODENAME:-$(hostname -s)}
GPUS=8                                 # as many ranks; fewer GPUs than that is a finding
SKU=                                   # such as H100; empty takes what the GPUs call themselves
EVERY_HOURS=24
RETRY_HOURS=2                          # after a check that could not be carried out
DEADLINE=1200                          # seconds; then the suite is ended in order, and that is no answer
EMPTY_WITHIN=300                       # seconds in which the last job must have left the node
DRAIN_ON=rejected                      # or: anything
CHECK=(acceptance/test_inventory.py acceptance/test_health.py acceptance/test_hbm.py acceptance/test_matmul.py
  acceptance/test_host_link.py acceptance/test_nccl.py --gpucluster-profile=quick)
# ---------------------------------------------------------------------------------------------------------------------
if [[ -r $HEALTH_CHECK_CONF ]]; then
  # shellcheck source=/dev/null
  source "$HEALTH_CHECK_CONF"
fi
export PATH # slurmd may hand on none, and bash keeps its own to itself

ours="gpucluster health check"
running="$ours: running"

log() {
  printf '%s %s: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$NODE" "$*"
  logger -t gpucluster-health -- "$*" 2>/dev/null || true # there need not be a syslog
}

# next_check HOURS: until then, none is due.
next_check() { printf '%s\n' "$(($(date +%s) + $1 * 3600))" >"$STATE_DIR/next"; }

is_due() {
  local next=0
  [[ ! -r $STATE_DIR/next ]] || read -r next <"$STATE_DIR/next" || next=0
  [[ $next =~ ^[0-9]+$ ]] || next=0
  (($(date +%s) >= next))
}

node() { scontrol --oneliner show node "$NODE"; }
state() { node | grep -oE ' State=[^ ]+' | cut -d= -f2; }
reason() { node | sed -nE 's/.* Reason=(.*)/\1/p'; }

# What idle nodes may be besides idle. Anything else (DOWN, COMPLETING, RESERVED, MAINT, PLANNED, POWERED_DOWN) is
# somebody else's business. NOT_RESPONDING, "*" of old, is so while slurmctld waits for the answer of this very program.
is_idle() {
  local word words
  IFS=+ read -r -a words <<<"${1%\*}"
  [[ ${words[0]:-} == IDLE ]] || return 1
  for word in "${words[@]:1}"; do
    case $word in DRAIN | NOT_RESPONDING | CLOUD | DYNAMIC_NORM | DYNAMIC_FUTURE) ;; *) return 1 ;; esac
  done
}

# drain TEXT: one line, short enough for sinfo -R and for Slurm.
drain() { scontrol update "NodeName=$NODE" State=DRAIN "Reason=$(printf '%s' "$1" | tr -cs '[:print:]' ' ' | cut -c1-240)"; }

# Back into service, unless it was drained for another reason in between. UNDRAIN leaves a node that is DOWN down. Fails
# where slurmctld does not answer: no next check is set then, so that the next one comes soon and finds it drained.
give_back() {
  local why
  if ! why=$(reason); then
    log "could not be given back: slurmctld does not report why the node is drained; the next check takes it up again"
    return 1
  fi
  if [[ $why != "$running"* ]]; then
    log "its reason is another one now: $why; it is left as it is"
  elif ! scontrol update "NodeName=$NODE" State=UNDRAIN; then
    log "could not be given back: it stays drained until the next check"
    return 1
  fi
}

# gpus_missing: says what is wrong where the driver lists fewer GPUs than there are. The suite would call 8 ranks on 7
# GPUs wrong usage, which drains no node. Without nvidia-smi that is left to the suite.
gpus_missing() {
  local listed found
  command -v nvidia-smi >/dev/null || return 1
  listed=$(timeout --kill-after=5 60 nvidia-smi --list-gpus 2>/dev/null </dev/null 9>&-)
  case $? in
    124 | 137) echo "nvidia-smi gives no answer within 60 s"; return 0 ;;
    126 | 127) return 1 ;; # it cannot be run, which says nothing of GPUs
  esac
  found=$(grep -c '^GPU [0-9]' <<<"$listed")
  ((found < GPUS)) && printf 'nvidia-smi lists %d of %d GPUs\n' "$found" "$GPUS"
}

# On SIGTERM, such as when the node is shut down, the node stays drained, and the next check finds that it was ours.
check() {
  local place code line verdict tries at
  rm -f "$STATE_DIR/next" # whatever cuts this check off, the next one is due
  drain "$running since $(date -u +%Y-%m-%dT%H:%M:%SZ)" || { log "cannot be drained: no right to? Nothing was run"; return 11; }
  for ((tries = 0; ; tries++)); do
    at=$(state)
    ! is_idle "$at" || break
    if ((tries >= EMPTY_WITHIN)) || [[ $at != *COMPLETING* ]]; then
      log "not idle (${at:-slurmctld does not say}): not checked"
      give_back
      return 11
    fi
    sleep 1
  done

  place=$STATE_DIR/reports/$(date -u +%Y%m%d-%H%M%S)-$$
  mkdir -p "$place"
  # Of the job whose epilog this is, the suite must know nothing: it is not in it.
  while read -r name; do unset "$name"; done < <(compgen -v | grep -E '^(SLURM_|CUDA_VISIBLE|GPU_DEVICE_ORDINAL|PYTEST_)' | grep -vx SLURM_CONF)
  log "checking; reports: $place"
  if [[ ${REHEARSE:-} != yes ]] && line=$(gpus_missing); then
    line="REJECTED, exit code 1: $line" verdict=1
    printf '%s\n' "$line" >"$place/output.txt"
  else
    run_checks
  fi
  log "exit code $verdict: $line"

  if ((verdict == 0)); then
    give_back && next_check "$EVERY_HOURS"
  elif ((verdict == 1)) || [[ $DRAIN_ON == anything ]]; then
    if drain "$ours: $line (see $NODE:$place)"; then
      next_check "$EVERY_HOURS"
    else
      log "could not be drained for it: it stays drained for the check, and the next one is due"
    fi
  else
    log "no answer: the node is not judged and goes back into service; output: $place/output.txt"
    give_back && next_check "$RETRY_HOURS"
  fi
  # The last twenty are kept.
  find "$STATE_DIR/reports" -mindepth 1 -maxdepth 1 -type d | sort | head -n -20 | xargs -r -d '\n' rm -rf --
  return "$verdict"
}

# run_checks: the suite, into $place; sets line and verdict, which are variables of check.
run_checks() {
  (cd "$SUITE_DIR" && timeout --signal=TERM --kill-after=60 "$DEADLINE" "$SUITE_VENV/bin/gpucluster" run --standalone \
    --nproc-per-node="$GPUS" -- "${CHECK[@]}" --gpucluster-expect="1x$GPUS${SKU:+x$SKU}" \
    --gpucluster-report-dir="$place" --junitxml="$place/report.xml" -p no:cacheprovider) >"$place/output.txt" 2>&1 </dev/null 9>&-
  code=$?
  line=$("$SUITE_VENV/bin/gpucluster" verdict "$place" --launcher-exit="$code" --json="$place/answer.json" 2>&1)
  verdict=$?
  line=${line#gpucluster: }
  # A program that cannot be started ends with 1 as well, which is no rejection: the answer must be there and say so.
  if [[ ! $verdict =~ ^(0|1|2|3|4|5|10|11|12)$ ]] ||
    { [[ $verdict =~ ^(0|1|10|12)$ ]] && ! grep -qsE "\"exit\": ${verdict}[,}]" "$place/answer.json"; }; then
    line="no verdict, gpucluster ended with $verdict: $(tail -n 1 <<<"$line")" verdict=11
  fi
  if [[ -s $place/answer.json && ${REHEARSE:-} != yes ]] && ! grep -q '"kind": ""' "$place/answer.json"; then
    line="a rehearsal on cpu, or a simulated cluster, says nothing of a GPU" verdict=11
  fi
  ((code != 124)) || line="not over after $DEADLINE s: $line"
}

main() {
  local how=${1:-} at why
  if [[ $how == detached ]]; then
    # It has the lock by the descriptor that it was started with, which opening the file again would close.
    check
    exit 0
  fi
  if ! mkdir -p "$STATE_DIR" || ! exec 9>"$STATE_DIR/lock"; then
    log "STATE_DIR $STATE_DIR cannot be written to: nothing is checked here"
    [[ $how == now ]] && exit 11
    exit 0
  fi
  if ! flock --nonblock 9; then
    [[ $how != now ]] || { log "another check is running here"; exit 11; }
    exit 0
  fi
  [[ $how == now ]] || is_due || exit 0
  at=$(state) why=""
  # After an epilog the node is completing, which the check itself waits for. A node that is drained for a check which
  # was cut off is taken up again.
  if [[ -z $at ]]; then
    why="scontrol knows nothing about this node: slurmctld does not answer, or NODE has to be set"
  elif [[ $at == *DRAIN* && $(reason) != "$running"* ]]; then
    why="drained already: $(reason)"
  elif ! is_idle "$at" && [[ ${SLURM_SCRIPT_CONTEXT:-} != epilog* ]]; then
    why="not idle: $at"
  fi
  if [[ -n $why ]]; then
    if [[ $how == now ]]; then
      log "$why"
      exit 11
    fi
    [[ -n $at ]] || log "$why" >>"$STATE_DIR/log"
    exit 0
  fi
  if [[ $how == now ]]; then
    check
    exit $?
  fi
  # In a session of its own, for slurmd ends the process group of what it has started; and it keeps the lock.
  setsid --fork "$BASH" "${BASH_SOURCE[0]}" detached </dev/null >>"$STATE_DIR/log" 2>&1
  exit 0
}

main "$@"
