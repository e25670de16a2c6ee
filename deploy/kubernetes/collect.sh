#!/usr/bin/env bash
# Waits for a Job of these manifests, brings logs and reports here, and ends with the exit code of the suite.
#
#   collect.sh [--job NAME] [--namespace NAME] [--within SECONDS] [--nodes LABELS] FOLDER
#
#   --job        acceptance (default), discovery, or what a name suffix has made of them
#   --within     how long to wait for the pods (default: until ten minutes after the Job's own deadline)
#   --nodes      for discovery: nodes with these labels should have answered; missing ones are named
#
#   LOG_SECONDS, REPORTS_SECONDS   how long one pod may take then to give its log (300), or its reports (1800)
#
# Exit codes: those of the run; 11 also where a pod is missing or has no exit code of the suite's, or where something
# could not be fetched; 2 for wrong usage. It changes nothing in the cluster but a pod of its own, which
# reads the volume of the reports and is deleted, and the file that lets the collectors go.
set -euo pipefail

job=acceptance namespace="" within="" nodes="" folder="" every=${POLL_SECONDS:-10}
log_seconds=${LOG_SECONDS:-300} reports_seconds=${REPORTS_SECONDS:-1800}
broken=11
# bash would end with 1, which means REJECTED.
trap 'echo "collect: line $LINENO failed" >&2; exit "$broken"' ERR

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
  echo "$1" >&2
  exit 2
}

while (($#)); do
  case $1 in
    --job | --namespace | --within | --nodes)
      [[ -n ${2:-} ]] || usage "$1 needs a value"
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    -*) usage "$1 is not known" ;;
    *)
      [[ -z $folder ]] || usage "two folders: $folder and $1"
      folder=$1
      shift
      ;;
  esac
done
[[ -n $folder ]] || usage "name a folder to collect into"
[[ $within =~ ^[0-9]*$ ]] || usage "--within $within: a number of seconds"
[[ $log_seconds =~ ^[1-9][0-9]*$ && $reports_seconds =~ ^[1-9][0-9]*$ ]] ||
  usage "LOG_SECONDS=$log_seconds REPORTS_SECONDS=$reports_seconds: a number of seconds each, 1 or more"
[[ -z $nodes || $job == discovery* ]] || usage "--nodes is for discovery"
command -v kubectl >/dev/null || usage "there is no kubectl on the PATH"
command -v timeout >/dev/null || usage "there is no timeout on the PATH: GNU coreutils have it"

# A node that has stalled lets kubectl wait for ever, so each call has a deadline of its own. In the foreground, so that
# Ctrl-C reaches kubectl.
kube() { # seconds, words of kubectl
  timeout --foreground --kill-after=5 "$1" kubectl ${namespace:+--namespace="$namespace"} "${@:2}"
}

look() { kube 60 get "$@" --request-timeout=30s; }

trouble=""
complain() {
  echo "collect: $1" >&2
  trouble=yes
}

# Index, name, node, exit code, phase, reasons of each pod. The container is called suite in all of them.
pods() {
  local state='.status.containerStatuses[?(@.name=="suite")].state'
  local index='{.metadata.annotations.batch\.kubernetes\.io/job-completion-index}'
  local why='{.status.conditions[?(@.reason=="Unschedulable")].message}'
  why="{.status.reason} {.status.message} {$state.waiting.reason} {$state.waiting.message} {$state.terminated.reason} $why"
  look pods --selector="batch.kubernetes.io/job-name=$job" --output=jsonpath="{range .items[*]}${index}|{.metadata.name}|\
{.spec.nodeName}|{$state.terminated.exitCode}|{.status.phase}|${why}{\"\\n\"}{end}" | sort -n
}

of_job() { look job "$job" --output=jsonpath="$1"; }

uid=$(of_job '{.metadata.uid}') || exit "$broken"
wanted=$(of_job '{.spec.completions}')
deadline=$(of_job '{.spec.activeDeadlineSeconds}')
claim=$(of_job '{.spec.template.spec.volumes[?(@.name=="reports")].persistentVolumeClaim.claimName}')
image=$(of_job '{.spec.template.spec.containers[?(@.name=="suite")].image}')
mkdir -p "$folder"

# A pod that keeps its reports goes on when its suite has ended, so it is the suites that are waited for.
unanswered=0
end=$((SECONDS + ${within:-$((${deadline:-14400} + 600))}))
while true; do
  over="" found=""
  if over=$(of_job '{range .status.conditions[?(@.status=="True")]}{.type} {end}') && found=$(pods); then
    unanswered=0
    [[ $over == *Complete* || $over == *Failed* ]] && break
    ended=$(awk -F'|' '$4 != "" || $5 == "Failed" || $5 == "Succeeded"' <<<"$found" | grep -c . || true)
    ((ended >= wanted)) && break
  else
    # An API server is restarted now and then.
    unanswered=$((unanswered + 1))
    ((unanswered < 10)) || { complain "the cluster does not answer"; exit "$broken"; }
  fi
  ((SECONDS < end)) || { complain "not over in time"; break; }
  sleep "$every"
done
[[ -z $over ]] || echo "collect: job/$job: $over"

there=$(awk -F'|' '$2 != "" { print $1 }' <<<"$found")
[[ $there == "$(seq 0 $((wanted - 1)))" ]] ||
  complain "there should be one pod of each index from 0 to $((wanted - 1)), and there are: ${there//$'\n'/ }"

first="" first_pod="" first_node="" worst=0 answered=""
while IFS='|' read -r index pod node code phase why; do
  [[ -n $pod ]] || continue
  read -r -a words <<<"$why"
  why=${words[*]-}
  case $code in
    0) ;;
    1 | 2 | 3 | 4 | 5 | 10 | 11 | 12) worst=$code ;;
    *)
      what="no exit code"
      [[ -z $code ]] || what="exit code $code, none of the suite's"
      complain "pod $pod on ${node:-no node}: $what, ${phase:-unknown}${why:+: $why}"
      code=$broken worst=$broken
      ;;
  esac
  if [[ $index == 0 ]]; then first=$code first_pod=$pod first_node=$node; fi
  [[ -n $node ]] || continue
  file=$node-$index.log
  [[ $job != discovery* ]] || file=$node.json
  begun=$SECONDS
  if ! kube "$log_seconds" logs "$pod" --container=suite </dev/null >"$folder/$file"; then
    lost="no log"
    ((SECONDS - begun < log_seconds)) || lost="no whole log within $log_seconds s"
    if [[ -s $folder/$file && $job != discovery* ]]; then
      mv "$folder/$file" "$folder/$file.part"
      lost+="; as much of it as came is $file.part"
    else
      rm -f "$folder/$file"
    fi
    complain "pod $pod on $node: $lost"
  elif [[ $job == discovery* && $code != 0 ]]; then
    complain "pod $pod on $node: no answer"
    rm -f "$folder/$file"
  else
    answered+="$node"$'\n'
  fi
done <<<"$found"
[[ $over != *Failed* || $worst != 0 ]] || complain "the Job has failed, although its pods say 0"

fetch() { # pod, container: this Job's folder, as far as the pod has it
  local part="$folder/.reports.tar" begun=$SECONDS
  if ! kube "$reports_seconds" exec "$1" --container="$2" -- tar -C /reports -cf - "$job-$uid" </dev/null >"$part"; then
    ((SECONDS - begun < reports_seconds)) || complain "pod $1: its reports did not come within $reports_seconds s"
    rm -f "$part"
    return 1
  fi
  local code=0
  tar -C "$folder" -xf "$part" || code=1
  rm -f "$part"
  return "$code"
}

if [[ $job == discovery* ]]; then
  if [[ -n $nodes ]]; then
    listed=$(look nodes --selector="$nodes" --output=jsonpath='{.items[*].metadata.name}') || listed=""
    [[ -n $listed ]] || complain "no node with the labels $nodes could be listed"
    for node in $listed; do
      grep -qxF "$node" <<<"$answered" || complain "$node has not answered"
    done
  fi
  echo "collect: $(grep -c . <<<"$answered" || true) of $wanted pods have answered: $folder"
elif [[ -n $claim ]]; then
  # As the user of the suite, whose files others may not be allowed to read; best on the node that has the image.
  user=$(of_job '{.spec.template.spec.containers[?(@.name=="suite")].securityContext.runAsUser}')
  [[ -n $user ]] || user=$(of_job '{.spec.template.spec.securityContext.runAsUser}')
  user=${user:-10001}
  tolerations=$(of_job '{.spec.template.spec.tolerations}')
  secrets=$(of_job '{.spec.template.spec.imagePullSecrets}')
  no_root=true near="[]"
  [[ $user != 0 ]] || no_root=false
  [[ -z $first_node ]] || near='[{"weight":100,"preference":{"matchFields":[
    {"key":"metadata.name","operator":"In","values":["'$first_node'"]}]}}]'
  spec='{"apiVersion":"v1","kind":"Pod","metadata":{"generateName":"'$job'-reader-"},"spec":{"restartPolicy":"Never",
    "automountServiceAccountToken":false,"activeDeadlineSeconds":3600,
    "tolerations":'${tolerations:-[]}',"imagePullSecrets":'${secrets:-[]}',
    "affinity":{"nodeAffinity":{"preferredDuringSchedulingIgnoredDuringExecution":'$near'}},
    "securityContext":{"runAsNonRoot":'$no_root',"runAsUser":'$user',"runAsGroup":10001,"fsGroup":10001,
      "seccompProfile":{"type":"RuntimeDefault"}},
    "containers":[{"name":"reader","image":"'$image'","command":["sleep","3600"],
      "resources":{"requests":{"cpu":"100m","memory":"128Mi"},"limits":{"cpu":"1","memory":"512Mi"}},
      "securityContext":{"allowPrivilegeEscalation":false,"readOnlyRootFilesystem":true,"capabilities":{"drop":["ALL"]}},
      "volumeMounts":[{"name":"reports","mountPath":"/reports","readOnly":true}]}],
    "volumes":[{"name":"reports","persistentVolumeClaim":{"claimName":"'$claim'"}}]}}'
  reader=""
  trap '[[ -z $reader ]] || kube 60 delete "$reader" --ignore-not-found --wait=false >/dev/null' EXIT
  if ! { reader=$(kube 60 create --filename=- --output=name <<<"$spec") \
    && kube 660 wait --for=condition=Ready "$reader" --timeout=600s >/dev/null && fetch "${reader#pod/}" reader; }; then
    complain "the reports on the volume $claim could not be fetched"
  fi
elif [[ -n $first_pod ]]; then
  # Pod 0 has the record, and comes last: its files are not replaced. Others have files of their own ranks.
  kept="" missed=""
  while IFS='|' read -r index pod _; do
    [[ -n $pod && $index != 0 ]] || continue
    if fetch "$pod" collector; then kept+=" $pod"; else missed+=" $pod"; fi
  done <<<"$found"
  if fetch "$first_pod" collector; then
    [[ -z $missed ]] || complain "no files of these pods:$missed"
    for pod in $kept $first_pod; do
      kube 60 exec "$pod" --container=collector -- touch /reports/.collected </dev/null ||
        complain "pod $pod: its collector waits on"
    done
  else
    complain "no reports: they go with the pod where neither reports-volume nor reports-collector is among the components"
  fi
fi
[[ ! -d $folder/$job-$uid ]] || echo "collect: reports: $folder/$job-$uid"

if [[ -n $first_pod ]]; then
  message='{.status.containerStatuses[?(@.name=="suite")].state.terminated.message}'
  look pod "$first_pod" --output=jsonpath="$message" || complain "pod $first_pod: no termination message"
  echo
else
  complain "pod 0 of job/$job is gone, and its exit code with it"
fi
# A pass counts only if all pods report it, and everything has been fetched.
[[ -n $first ]] || first=$broken
((first != 0 || worst == 0)) || first=$broken
[[ -z $trouble ]] || ((first != 0)) || first=$broken
exit "$first"
