#!/usr/bin/env bash
# What a training cluster needs beside EKS's own add-ons: GPUs and EFA as resources, JobSet. Safe to run again.
#
#   deploy/eks/addons.sh              device plugins and JobSet
#   DRA=1 deploy/eks/addons.sh        EFA through dynamic resource allocation (Kubernetes 1.34) instead of its plugin
set -euo pipefail

NVIDIA_PLUGIN=${NVIDIA_PLUGIN:-0.17.1}
EFA_PLUGIN=${EFA_PLUGIN:-v0.5.29}
JOBSET=${JOBSET:-v0.12.0}

for tool in kubectl helm; do
    command -v "$tool" >/dev/null || { echo "addons: $tool is needed" >&2; exit 1; }
done

helm upgrade --install nvidia-device-plugin nvidia-device-plugin \
    --repo https://nvidia.github.io/k8s-device-plugin --version "$NVIDIA_PLUGIN" --namespace kube-system \
    --set-json 'affinity={}' --set-json 'nodeSelector={"ridethrough/role":"gpu"}'

efa_chart=aws-efa-k8s-device-plugin efa_version=$EFA_PLUGIN
if [ -n "${DRA:-}" ]; then
    efa_chart=aws-dranet efa_version=${DRANET:?set DRANET to the chart version that fits this Kubernetes}
fi
helm upgrade --install "$efa_chart" "$efa_chart" \
    --repo https://aws.github.io/eks-charts --version "$efa_version" --namespace kube-system \
    --set-json 'tolerations=[{"key":"nvidia.com/gpu","operator":"Exists","effect":"NoSchedule"}]'

kubectl apply --server-side -f "https://github.com/kubernetes-sigs/jobset/releases/download/$JOBSET/manifests.yaml"
kubectl -n jobset-system rollout status deployment/jobset-controller-manager --timeout=5m
