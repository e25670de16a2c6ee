#!/usr/bin/env bash
# Install an operator for the custom resources in this folder, at a pinned version. Running it again is safe.
#
#   install-operator.sh [--dry-run] [--timeout SECONDS] OPERATOR...
#
#   trainer             Kubeflow Trainer v2 with JobSet: TrainJob            (trainer/)
#   training-operator   Kubeflow Training Operator v1, legacy: PyTorchJob    (pytorchjob/)
#   mpi-operator        Kubeflow MPI Operator v2beta1: MPIJob                (mpijob/)
#
# --dry-run shows the commands and changes nothing; the cluster is only read. It needs the rights of a cluster's
# administrator: an operator brings custom resource definitions and cluster roles.
#
# Exit codes: 0 installed, or shown; 1 the cluster refused, or an operator did not become ready; 2 wrong usage, a
# program is missing, no cluster answers, or what is there already forbids it.
set -euo pipefail

# Other versions: set these in the environment. The manifests are checked against these.
TRAINER_VERSION="${TRAINER_VERSION:-v2.3.0}"
TRAINING_OPERATOR_VERSION="${TRAINING_OPERATOR_VERSION:-v1.9.3}"
MPI_OPERATOR_VERSION="${MPI_OPERATOR_VERSION:-v0.8.2}"

readonly MPIJOBS=mpijobs.kubeflow.org
dry_run=false
timeout_seconds=300
operators=()

say() { printf 'install-operator: %s\n' "$*" >&2; }

refuse() {
  say "$*"
  exit 2
}

usage() { sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

read_arguments() {
  while (($#)); do
    case $1 in
      --dry-run) dry_run=true ;;
      --timeout)
        [[ ${2:-} =~ ^[1-9][0-9]{0,4}$ ]] || refuse "--timeout ${2:-}: a number of seconds is needed, from 1 to 99999"
        timeout_seconds=$2
        shift
        ;;
      -h | --help)
        usage
        exit 0
        ;;
      trainer | training-operator | mpi-operator) operators+=("$1") ;;
      *) refuse "$1: not known; trainer, training-operator and mpi-operator can be installed (--help)" ;;
    esac
    shift
  done
  ((${#operators[@]})) || refuse "say what to install: trainer, training-operator or mpi-operator (--help)"
}

check_programs() {
  command -v kubectl >/dev/null || refuse "kubectl is not on PATH: install it, of about the cluster's own version"
  # kubectl fetches a remote kustomization by git.
  command -v git >/dev/null || refuse "git is not on PATH: kubectl fetches the manifests by it"
  kubectl version --request-timeout=30s >/dev/null \
    || refuse "no cluster answers kubectl: look at 'kubectl config current-context' and KUBECONFIG"
}

# The versions of MPIJob that the cluster knows; nothing where it knows none.
mpijob_versions() {
  kubectl get crd "$MPIJOBS" --ignore-not-found --output='jsonpath={.spec.versions[*].name}'
}

# Both operators bring a definition of MPIJob, under one name: v1 and v2beta1 exclude each other.
# Source: https://github.com/kubeflow/trainer/issues/1930
check_mpijob() {
  local versions wants_v1=false wants_v2=false operator
  for operator in "${operators[@]}"; do
    [[ $operator == training-operator ]] && wants_v1=true
    [[ $operator == mpi-operator ]] && wants_v2=true
  done
  if $wants_v1 && $wants_v2; then
    refuse "training-operator and mpi-operator each bring their own $MPIJOBS, and a cluster has room for one"
  fi
  versions=" $(mpijob_versions) " || refuse "kubectl cannot read $MPIJOBS: see above"
  if $wants_v1 && [[ $versions == *" v2beta1 "* ]]; then
    refuse "the cluster has $MPIJOBS of mpi-operator (v2beta1), which training-operator would replace by its v1." \
      "What to do: use trainer, or mpijob/ with the mpi-operator that is there"
  fi
  if $wants_v2 && [[ $versions == *" v1 "* && $versions != *" v2beta1 "* ]]; then
    refuse "the cluster has $MPIJOBS of training-operator (v1), and mpi-operator needs v2beta1." \
      "What to do: use trainer or pytorchjob/; or take training-operator away first, which deletes its jobs"
  fi
}

run() {
  if $dry_run; then
    printf '%q ' "$@"
    printf '\n'
    return
  fi
  "$@"
}

# Wait until a definition is in force, and until deployments answer.
ready() {
  local namespace=$1 definition=$2 deployment
  shift 2
  run kubectl wait --for=condition=Established "crd/$definition" --timeout="${timeout_seconds}s" || return 1
  for deployment in "$@"; do
    run kubectl rollout status "deployment/$deployment" --namespace="$namespace" --timeout="${timeout_seconds}s" \
      || return 1
  done
}

# Called in a condition, where `set -e` is off: each step says for itself whether the next one comes.
install() {
  case $1 in
    trainer)
      run kubectl apply --server-side \
        -k "https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=$TRAINER_VERSION" &&
        ready kubeflow-system trainjobs.trainer.kubeflow.org \
          jobset-controller-manager kubeflow-trainer-controller-manager
      ;;
    training-operator)
      run kubectl apply --server-side \
        -k "https://github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=$TRAINING_OPERATOR_VERSION" &&
        ready kubeflow pytorchjobs.kubeflow.org training-operator
      ;;
    mpi-operator)
      run kubectl apply --server-side \
        -f "https://raw.githubusercontent.com/kubeflow/mpi-operator/$MPI_OPERATOR_VERSION/deploy/v2beta1/mpi-operator.yaml" &&
        ready mpi-operator "$MPIJOBS" mpi-operator
      ;;
  esac
}

read_arguments "$@"
check_programs
check_mpijob
for operator in "${operators[@]}"; do
  say "$operator"
  install "$operator" || {
    say "$operator is not ready, see above; nothing was taken away, and running this again is safe"
    exit 1
  }
done
if $dry_run; then
  say "nothing was changed (--dry-run)"
fi
