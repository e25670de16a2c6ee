#!/usr/bin/env bash
# Keeps a pod when its suite has ended, until the reports have been fetched (deploy/kubernetes/collect.sh).
#
#   SUITE_LOCK     held by suite.sh for as long as it runs; the kernel lets go of it however that ends
#   KEEP_SECONDS   how long to wait then for the file .collected in the same folder
set -uo pipefail

lock=${SUITE_LOCK:?"the file that suite.sh locks"}
collected=$(dirname "$lock")/.collected
trap 'exit 0' TERM INT

nap() {
  sleep 2 &
  wait "$!"
}

# It is empty until it is locked.
until [[ -s $lock ]]; do nap; done
until flock --nonblock "$lock" true; do nap; done
echo "the suite has ended; the reports stay for ${KEEP_SECONDS:=1800} s, or until $collected is there"
end=$((SECONDS + KEEP_SECONDS))
until [[ -e $collected ]] || ((SECONDS >= end)); do nap; done
[[ -e $collected ]] && echo "collected" || echo "not collected within $KEEP_SECONDS s"
