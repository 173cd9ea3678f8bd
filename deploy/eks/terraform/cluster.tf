resource "aws_iam_role" "cluster" {
  name               = "${var.name}-cluster"
  assume_role_policy = data.aws_iam_policy_document.cluster_assume.json
}

data "aws_iam_policy_document" "cluster_assume" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["eks.amazonaws.com"]
    }
  }
}

resource "aws_iam_role_policy_attachment" "cluster" {
  role       = aws_iam_role.cluster.name
  policy_arn = "arn:aws:iam::aws:policy/AmazonEKSClusterPolicy"
}

resource "aws_eks_cluster" "main" {
  name     = var.name
  version  = var.kubernetes_version
  role_arn = aws_iam_role.cluster.arn

  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = true
  }

  vpc_config {
    subnet_ids              = aws_subnet.private[*].id
    endpoint_private_access = true
    endpoint_public_access  = true
    public_access_cidrs     = var.api_access_cidrs
  }

  depends_on = [aws_iam_role_policy_attachment.cluster]
}

# What may run as soon as the cluster is there; nodes that are not ready without a network wait for vpc-cni.
resource "aws_eks_addon" "early" {
  for_each     = toset(["vpc-cni", "kube-proxy", "eks-pod-identity-agent", "eks-node-monitoring-agent"])
  cluster_name = aws_eks_cluster.main.name
  addon_name   = each.key
}

resource "aws_eks_addon" "coredns" {
  cluster_name = aws_eks_cluster.main.name
  addon_name   = "coredns"
  depends_on   = [aws_eks_node_group.system]
}

resource "aws_eks_addon" "fsx" {
  cluster_name = aws_eks_cluster.main.name
  addon_name   = "aws-fsx-csi-driver"

  pod_identity_association {
    role_arn        = aws_iam_role.fsx.arn
    service_account = "fsx-csi-controller-sa"
  }

  depends_on = [aws_eks_node_group.system]
}

resource "aws_iam_role" "fsx" {
  name               = "${var.name}-fsx-csi"
  assume_role_policy = data.aws_iam_policy_document.pod_identity.json
}

data "aws_iam_policy_document" "pod_identity" {
  statement {
    actions = ["sts:AssumeRole", "sts:TagSession"]

    principals {
      type        = "Service"
      identifiers = ["pods.eks.amazonaws.com"]
    }
  }
}

# The volume is bound statically, so the driver only looks.
resource "aws_iam_role_policy" "fsx" {
  name   = "describe"
  role   = aws_iam_role.fsx.name
  policy = data.aws_iam_policy_document.fsx.json
}

data "aws_iam_policy_document" "fsx" {
  statement {
    actions   = ["fsx:DescribeFileSystems"]
    resources = ["*"]
  }
}
