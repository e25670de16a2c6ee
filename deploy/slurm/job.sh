# shellcheck shell=bash
# What the batch scripts of this folder share; they source it. sbatch copies a script away from its folder, so they find
# this file below SUITE_DIR, which all nodes must see. Nothing here is the site's own: that stands in the scripts.
#
# Set by the scripts:  SUITE_DIR SUITE_VENV GPUCLUSTER_REPORT_DIR CONTAINER_IMAGE CONTAINER_MOUNTS
# Set here:            folder (of this job's reports), program and container (how the suite is called)

say() { printf 'gpucluster: %s\n' "$*"; }

# Codes of the suite itself: 2 is wrong usage, nothing was measured; 11 is a fault of the environment.
refuse() { say "BROKEN, exit code 2: $*" >&2; exit 2; }
broken() { say "BROKEN, exit code 11: $*" >&2; exit 11; }

# begin_job NAME [PYTEST OPTION...]: a new folder of this name for the reports, and a suite that can be called.
begin_job() {
  local name=$1 word
  shift
  [[ -n ${SLURM_JOB_ID:-} && -n ${SLURM_JOB_NODELIST:-} ]] || refuse "no job of Slurm: start this script with sbatch"
  [[ -d $SUITE_DIR ]] || refuse "SUITE_DIR $SUITE_DIR is no folder on ${SLURMD_NODENAME:-this node}"
  for word in "$@"; do
    case $word in
      --gpucluster-report-dir* | --junitxml* | --junit-xml*)
        refuse "$word: this job chooses the place of its reports: export GPUCLUSTER_REPORT_DIR instead" ;;
    esac
  done
  # One process's own: passed on, they would be those of every rank. The ranks find their own again.
  unset GPUCLUSTER_HOSTNAME RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR

  local root=$GPUCLUSTER_REPORT_DIR
  [[ $root == /* ]] || root=$PWD/$root
  # A job that was requeued keeps its number. What it had found before stays where it is.
  folder=$root/$name${SLURM_RESTART_COUNT:+-restart$SLURM_RESTART_COUNT}
  # The plugin gets it as an option; a second source would only confuse the header.
  unset GPUCLUSTER_REPORT_DIR
  mkdir -p "${folder%/*}" || broken "${folder%/*} cannot be made: GPUCLUSTER_REPORT_DIR must be writable"
  mkdir "$folder" || broken "$folder cannot be made, or is there already: reports are never overwritten"
  mkdir "$folder/nodes" || broken "$folder cannot be written to"

  container=()
  if [[ -n $CONTAINER_IMAGE ]]; then
    # pyxis reads commas and colons in here itself, and there is no way to quote them.
    [[ $folder != *[,:]* ]] || refuse "$folder: no comma and no colon in a path that a container mounts"
    program=(gpucluster)
    # By its name a later step of this job finds the image unpacked.
    container=("--container-image=$CONTAINER_IMAGE" "--container-name=gpucluster-$SLURM_JOB_ID"
      "--container-mounts=$folder:$folder${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
      "--container-workdir=${CONTAINER_SUITE_DIR:-/opt/pytest-gpucluster}" --no-container-mount-home)
    trap forget_container EXIT
  else
    program=("$SUITE_VENV/bin/gpucluster")
    [[ -x ${program[0]} ]] ||
      refuse "${program[0]} cannot be run on ${SLURMD_NODENAME:-this node}: install the suite into SUITE_VENV on a file" \
        "system that all nodes share, or export CONTAINER_IMAGE"
  fi
  cd "$SUITE_DIR" || refuse "SUITE_DIR $SUITE_DIR cannot be entered"
}

# on_nodes SRUN_OPTION... -- FUNCTION ARGUMENT...: one task on each node of the job calls a function of this file.
#
# --cpu-bind=none: a task is all ranks of its node, and may use every CPU that the step has. --wait=0 and
# --kill-on-bad-exit=0: tasks may end one after the other; ending the others would cut off what rank 0 still writes.
# --no-kill: nor does Slurm end the others when a node is lost, so that the run can name it; sbatch's own --no-kill
# keeps the job and this script, but no step. --export=ALL and --mpi=none: whatever the site has as its default.
# torchrun starts the ranks, no MPI. Source: srun(1), sbatch(1).
on_nodes() {
  local options=()
  while [[ $1 != -- ]]; do options+=("$1"); shift; done
  shift
  # Slurm's own number of a job's nodes, not SLURM_NTASKS: sbatch may have been given other tasks.
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
    --kill-on-bad-exit=0 --wait=0 --no-kill --export=ALL --mpi=none "${options[@]}" "${container[@]}" \
    bash -c "$(declare -f "$1"); \"\$@\"" gpucluster-node "$@"
}

# nodes_left: how many nodes the job still has. One that is lost is taken out of it, and a step for as many as at the
# start would wait until the time limit for a node that does not come.
nodes_left() {
  local nodes
  nodes=$(scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null | grep -oE ' NumNodes=[0-9]+' | head -n 1)
  nodes=${nodes#*=}
  printf '%s\n' "${nodes:-$SLURM_JOB_NUM_NODES}"
}

# On a node: what must be there before ranks are started. Its answer in the shared folder proves that the folder is
# shared.
node_is_ready() {
  local folder=$1 version
  shift
  if [[ ! -e $folder/nodes ]]; then
    echo "$SLURMD_NODENAME does not see $folder: it must be on a file system that all nodes share" >&2
    return 1
  fi
  version=$("$@" --version 2>&1) || version="$1 --version failed: $version"
  printf '%s\n' "$version" >"$folder/nodes/$SLURMD_NODENAME"
}

# On a node: facts about it. The file gets its name only when it is complete.
node_describes_itself() {
  local folder=$1
  shift
  [[ -d $folder/nodes ]] || { echo "$SLURMD_NODENAME does not see $folder: it must be shared by all nodes" >&2; return 1; }
  timeout --kill-after=5 120 "$@" node info all --json >"$folder/nodes/.$SLURMD_NODENAME" || return 1
  mv "$folder/nodes/.$SLURMD_NODENAME" "$folder/nodes/$SLURMD_NODENAME.json"
}

# require_nodes: every node sees the folder, can call the suite, and has the same version of it. Else nothing starts.
require_nodes() {
  local node tries=0 answers missing=()
  on_nodes --job-name=gpucluster-nodes --time="${READY_MINUTES:-30}" -- node_is_ready "$folder" "${program[@]}" ||
    say "not every node was ready" >&2
  for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    # What a node has written may be seen some seconds later (NFS: acregmin, acdirmin): ten seconds for all of them.
    while [[ ! -s $folder/nodes/$node ]] && ((tries++ < 20)); do sleep 0.5; done
    [[ -s $folder/nodes/$node ]] || missing+=("$node")
  done
  ((${#missing[@]} == 0)) ||
    broken "no answer from ${missing[*]}: the node is gone, does not see $folder, or cannot start the container"
  answers=$(cat "$folder"/nodes/* | sort -u)
  [[ $answers == "pytest-gpucluster "* && $answers != *$'\n'* ]] ||
    broken "the nodes have no suite, or different ones:"$'\n'"$(grep -r . "$folder/nodes")"
  [[ $(nodes_left) -ge $SLURM_JOB_NUM_NODES ]] ||
    broken "a node of $SLURM_JOB_NODELIST was lost before the suite could start: sinfo shows which"
}

# require_gpus [PYTEST OPTION...]: the number of ranks of a node is known.
require_gpus() {
  [[ -z ${RANKS_PER_NODE:-}${SLURM_GPUS_ON_NODE:-} ]] || return 0
  [[ ${GPUCLUSTER_DEVICE:-} != cpu && " $* " != *" --gpucluster-device"[=\ ]"cpu "* ]] || return 0
  refuse "Slurm gave this job no GPUs (SLURM_GPUS_ON_NODE is not set): ask for them with --gpus-per-node or --gres, or" \
    "export RANKS_PER_NODE where the site hands out whole nodes without counting GPUs"
}

# On a node: the suite, until it ends. SIGTERM and SIGURG end it in order, whichever comes first. SIGURG is what this
# job itself sends: Slurm signals every process of a step, and SIGURG does nothing to those that do not wait for it.
node_runs() {
  local gpucluster=$1 head=$2 port=$3
  shift 3
  local ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}} child="" ending="" heard="" code
  trap 'heard=yes; if [[ -z $ending ]]; then ending=yes; [[ -z $child ]] || kill -TERM "$child"; fi' URG TERM
  "$gpucluster" run --nnodes="$SLURM_STEP_NUM_NODES" --node-rank="$SLURM_NODEID" ${ranks:+--nproc-per-node="$ranks"} \
    --master-addr="$head" --master-port="$port" -- "$@" &
  child=$!
  [[ -z $ending ]] || kill -TERM "$child"
  while :; do
    heard=""
    wait "$child"
    code=$?
    # A signal ends the wait, not the run. A second wait returns the code, also of a process that has ended by then.
    [[ -n $heard ]] || return "$code"
  done
}

# address_of_head: where the ranks meet. By its name in Slurm, or by its address where the name does not resolve.
address_of_head() {
  local head address
  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  [[ -n $head ]] || return 1
  if ! getent ahosts "$head" >/dev/null; then
    address=$(scontrol --oneliner show node "$head" | grep -oE ' NodeAddr=[^ ]+' | head -n 1)
    head=${address#* NodeAddr=}
  fi
  printf '%s\n' "$head"
}

# run_suite PYTEST_ARGUMENT...: all nodes of the job together; then the verdict, the reports, and the end of this job.
# Without a path: acceptance/ below SUITE_DIR, else the suite inside the package.
#
# The port is another one for each job, and below those that Linux gives away (ip_local_port_range).
run_suite() {
  local head step code=0 resending="" heard="" own=$SLURM_JOB_ID
  # The number of one element of an array is that of the whole array, and what is sent there would end all others, too.
  [[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || own=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  head=${HEAD_ADDRESS:-$(address_of_head)}
  [[ -n $head ]] || broken "scontrol does not name the first of $SLURM_JOB_NODELIST: export HEAD_ADDRESS"
  local port=${MASTER_PORT:-$((20000 + 16 * SLURM_JOB_ID % 10000))}
  unset MASTER_PORT
  trap 'heard=yes' TERM
  on_nodes --job-name=gpucluster-suite -- node_runs "${program[0]}" "$head" "$port" "$@" \
    --gpucluster-report-dir="$folder" --junitxml="$folder/report.xml" -o "cache_dir=$folder/pytest-cache" &
  step=$!
  while :; do
    heard=""
    wait "$step"
    code=$?
    [[ -n $heard ]] || break
    [[ -z $resending ]] || continue
    say "ended by the time limit or scancel: the ranks end in order, and the reports are written"
    # More than once: a node that was just starting may have missed it. But not for longer than this script lives, for a
    # job that is requeued has the same number: scancel itself tries a job that is just ending again, after 5 s.
    while kill -0 "$$" 2>/dev/null; do
      timeout 4 scancel --signal=URG "$own" 2>/dev/null
      sleep 5
    done &
    resending=$!
  done
  if [[ -n $resending ]]; then
    kill "$resending" 2>/dev/null
    wait_for_record
  fi
  conclude "$code"
}

# After scancel srun may be gone before its ranks are. They have KillWait seconds (slurm.conf; 30 by default), as this
# has.
wait_for_record() {
  local tries
  for ((tries = 0; tries < 30; tries++)); do
    ! grep -qs '"type": *"end"' "$folder/latest/journal.jsonl" || return 0
    sleep 0.5
  done
}

# call_suite ARGUMENT...: `gpucluster` on this node, in the container if that is where it is.
call_suite() {
  if [[ -z $CONTAINER_IMAGE ]]; then
    "${program[@]}" "$@"
  else
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" --export=ALL --mpi=none "${container[@]}" \
      "${program[@]}" "$@"
  fi
}

# forget_container: at the end of a job in containers. pyxis keeps a named one, all of the image unpacked, on every
# node, unless the site has set container_scope=job. Source: pyxis, config.c and pyxis_slurmstepd.c (container_scope;
# the name).
forget_container() {
  local container=() left
  left=$(nodes_left)
  on_nodes --nodes="$left" --ntasks="$left" --overlap --job-name=gpucluster-clean --time=5 -- \
    node_forgets "pyxis_gpucluster-$SLURM_JOB_ID" ||
    say "a container may be left on a node; there: enroot remove pyxis_gpucluster-$SLURM_JOB_ID" >&2
}

# On a node, outside of the container.
node_forgets() {
  command -v enroot >/dev/null && enroot list 2>/dev/null | grep -qxF -- "$1" || return 0
  enroot remove --force "$1" </dev/null >/dev/null
}

# conclude CODE: the recorded verdict, compared with srun's exit code; then the reports; it sets `status`.
#
# srun ends with the highest code of all nodes, which is not the run's: 11 of a node that lost its neighbour is above
# the 1 of a rejection.
conclude() {
  trap '' TERM # what follows is the last thing that this job does, and takes seconds
  call_suite verdict "$folder" --launcher-exit="$1" --json="$folder/answer.json"
  status=$?
  case $status in
    0 | 1 | 10 | 12)
      # A program that cannot start ends with 1 as well, and so does srun: without the answer, that is no verdict.
      if ! grep -qsE "\"exit\": ${status}[,}]" "$folder/answer.json"; then
        say "BROKEN, exit code 11: gpucluster verdict ended with $status and left no answer.json with that code" >&2
        status=11
      fi
      ;;
    2 | 3 | 4 | 5 | 11) ;;
    *) say "BROKEN, exit code 11: gpucluster verdict ended with $status" >&2; status=11 ;;
  esac
  call_suite report "$folder" --all="$folder/rendered" || say "not all reports could be rendered from $folder" >&2
  say "exit code $status; reports: $folder"
}
