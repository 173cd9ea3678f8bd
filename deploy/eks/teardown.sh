#!/usr/bin/env bash
# From a cluster back to nothing, in the order in which nothing is lost and nothing is left that costs money:
# results out, job, claim, GPU nodes to zero, file system, registry, cluster.
#
#   deploy/eks/teardown.sh job.yaml                     says what it would do
#   deploy/eks/teardown.sh job.yaml --yes               does it (terraform's cluster)
#   deploy/eks/teardown.sh job.yaml --yes --nodes-only  results, job, nodes: for tomorrow's work (or a Capacity Block)
#
# With a Capacity Block be done 30 minutes before its end: then EC2 begins to take the instances away.
# Set OUT for the results' folder, TF for the Terraform folder. Each step is safe to repeat; the first failure stops.
set -euo pipefail

JOB=${1:?which job? deploy/eks/teardown.sh job.yaml [--yes] [--nodes-only]}
shift
YES= NODES_ONLY=
for word in "$@"; do
    case $word in
    --yes) YES=1 ;;
    --nodes-only) NODES_ONLY=1 ;;
    *) echo "teardown: unknown option $word" >&2; exit 2 ;;
    esac
done
TF=${TF:-$(dirname "$0")/terraform}
OUT=${OUT:-results}

step() { # step TEXT COMMAND...
    echo "== $1"
    shift
    echo "   $*"
    [ -z "$YES" ] || "$@"
}

nodes_gone() { # nodes_gone GROUP: half an hour at most
    local left
    for _ in $(seq 120); do
        left=$(aws autoscaling describe-auto-scaling-groups --auto-scaling-group-names "$1" \
            --query 'length(AutoScalingGroups[0].Instances)' --output text)
        [ "$left" != 0 ] || return 0
        sleep 15
    done
    echo "teardown: $left instances of $1 are still there after 30 minutes" >&2
    return 1
}

output() { terraform -chdir="$TF" output -raw "$1" 2>/dev/null || echo "<$1>"; }

step "1. results out" ridethrough k8s collect "$JOB" --out "$OUT"
step "2. the job; its pods end with their grace" ridethrough k8s delete "$JOB"
if [ -z "$NODES_ONLY" ]; then
    step "3. the claim; the file system keeps its data until step 5" ridethrough k8s delete "$JOB" --with-claim
fi
step "4. GPU nodes to zero" aws autoscaling update-auto-scaling-group \
    --auto-scaling-group-name "$(output gpu_group)" --min-size 0 --desired-capacity 0
step "   ... and until they are gone" nodes_gone "$(output gpu_group)"
if [ -n "$NODES_ONLY" ]; then
    echo "== kept: claim, file system, registry, cluster"
    exit 0
fi
step "5. the file system with all its data" terraform -chdir="$TF" destroy -auto-approve -target=aws_fsx_lustre_file_system.shared
step "6. the registry with its images" terraform -chdir="$TF" destroy -auto-approve -target=aws_ecr_repository.images
step "7. the cluster and its network" terraform -chdir="$TF" destroy -auto-approve
[ -n "$YES" ] || echo "== nothing was done; add --yes"
