# Two groups: a managed one without GPUs, which EKS repairs, and a self-managed one with GPUs, EFA and a placement group.

resource "aws_iam_role" "node" {
  name               = "${var.name}-node"
  assume_role_policy = data.aws_iam_policy_document.node_assume.json
}

data "aws_iam_policy_document" "node_assume" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role_policy_attachment" "node" {
  for_each = toset([
    "AmazonEKSWorkerNodePolicy",
    "AmazonEKS_CNI_Policy",
    "AmazonEC2ContainerRegistryPullOnly",
  ])
  role       = aws_iam_role.node.name
  policy_arn = "arn:aws:iam::aws:policy/${each.key}"
}

resource "aws_iam_instance_profile" "node" {
  name = "${var.name}-node"
  role = aws_iam_role.node.name
}

# Managed groups get their entry from EKS; self-managed nodes need one.
resource "aws_eks_access_entry" "node" {
  cluster_name  = aws_eks_cluster.main.name
  principal_arn = aws_iam_role.node.arn
  type          = "EC2_LINUX"
}

locals {
  lustre_client = <<-EOT
    #!/bin/bash
    dnf install -y lustre-client
  EOT

  node_config = yamlencode({
    apiVersion = "node.eks.aws/v1alpha1"
    kind       = "NodeConfig"
    spec = {
      cluster = {
        name                 = aws_eks_cluster.main.name
        apiServerEndpoint    = aws_eks_cluster.main.endpoint
        certificateAuthority = aws_eks_cluster.main.certificate_authority[0].data
        cidr                 = aws_eks_cluster.main.kubernetes_network_config[0].service_ipv4_cidr
      }
      instance = { localStorage = { strategy = "RAID0" } }
      kubelet = {
        flags = [
          "--node-labels=ridethrough/role=gpu",
          "--register-with-taints=nvidia.com/gpu=true:NoSchedule",
        ]
      }
    }
  })
}

resource "aws_launch_template" "system" {
  name = "${var.name}-system"
  user_data = base64encode(join("\n", [
    "MIME-Version: 1.0",
    "Content-Type: multipart/mixed; boundary=\"//\"",
    "",
    "--//",
    "Content-Type: text/x-shellscript; charset=\"us-ascii\"",
    "",
    local.lustre_client,
    "--//--",
  ]))

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
}

resource "aws_eks_node_group" "system" {
  cluster_name    = aws_eks_cluster.main.name
  node_group_name = "system"
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = [aws_subnet.private[0].id]
  instance_types  = ["m7i.2xlarge"]
  ami_type        = "AL2023_x86_64_STANDARD"
  labels          = { "ridethrough/role" = "system" }

  launch_template {
    id      = aws_launch_template.system.id
    version = aws_launch_template.system.latest_version
  }

  scaling_config {
    min_size     = 1
    desired_size = 2
    max_size     = 3
  }

  node_repair_config {
    enabled = true
  }

  depends_on = [aws_iam_role_policy_attachment.node, aws_eks_addon.early]
}

resource "aws_placement_group" "gpu" {
  name     = "${var.name}-gpu"
  strategy = "cluster"
}

# EFA passes the operating system by: its security group must allow everything from and to itself.
resource "aws_security_group" "efa" {
  name        = "${var.name}-efa"
  description = "EFA between training nodes"
  vpc_id      = aws_vpc.main.id
}

resource "aws_vpc_security_group_ingress_rule" "efa" {
  security_group_id            = aws_security_group.efa.id
  referenced_security_group_id = aws_security_group.efa.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "efa" {
  security_group_id            = aws_security_group.efa.id
  referenced_security_group_id = aws_security_group.efa.id
  ip_protocol                  = "-1"
}

data "aws_ssm_parameter" "gpu_image" {
  name = "/aws/service/eks/optimized-ami/${var.kubernetes_version}/amazon-linux-2023/x86_64/nvidia/recommended/image_id"
}

resource "aws_launch_template" "gpu" {
  name          = "${var.name}-gpu"
  image_id      = data.aws_ssm_parameter.gpu_image.value
  instance_type = var.gpu.instance_type
  user_data = base64encode(join("\n", [
    "MIME-Version: 1.0",
    "Content-Type: multipart/mixed; boundary=\"//\"",
    "",
    "--//",
    "Content-Type: application/node.eks.aws",
    "",
    local.node_config,
    "--//",
    "Content-Type: text/x-shellscript; charset=\"us-ascii\"",
    "",
    local.lustre_client,
    "--//--",
  ]))

  iam_instance_profile {
    arn = aws_iam_instance_profile.node.arn
  }

  placement {
    group_name = aws_placement_group.gpu.name
  }

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_size           = var.gpu.disk_gib
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }

  # The first card carries IP (ENA) and, beside it, EFA; every other one EFA alone, which takes no IP address.
  network_interfaces {
    network_card_index    = 0
    device_index          = 0
    interface_type        = "interface"
    delete_on_termination = true
    security_groups       = [aws_eks_cluster.main.vpc_config[0].cluster_security_group_id, aws_security_group.efa.id]
  }

  dynamic "network_interfaces" {
    for_each = range(var.gpu.efa_cards)

    content {
      network_card_index    = network_interfaces.value
      device_index          = network_interfaces.value == 0 ? 1 : 0
      interface_type        = "efa-only"
      delete_on_termination = true
      security_groups       = [aws_security_group.efa.id]
    }
  }

  dynamic "instance_market_options" {
    for_each = var.capacity_block == null ? [] : [var.capacity_block]

    content {
      market_type = "capacity-block"
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = var.capacity_block == null ? [] : [var.capacity_block]

    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value.reservation_id
      }
    }
  }

  tag_specifications {
    resource_type = "instance"
    tags          = { Name = "${var.name}-gpu" }
  }
}

# Starts at zero; scaled for a job and back (docs/eks.md), so Terraform leaves the wished-for size alone.
resource "aws_autoscaling_group" "gpu" {
  name                = "${var.name}-gpu"
  min_size            = 0
  desired_capacity    = 0
  max_size            = var.gpu.max_nodes
  vpc_zone_identifier = [aws_subnet.private[0].id]

  launch_template {
    id      = aws_launch_template.gpu.id
    version = aws_launch_template.gpu.latest_version
  }

  tag {
    key                 = "kubernetes.io/cluster/${var.name}"
    value               = "owned"
    propagate_at_launch = true
  }

  lifecycle {
    ignore_changes = [desired_capacity]
  }

  depends_on = [aws_eks_access_entry.node, aws_eks_addon.early]
}

# EC2 takes the instances of a Capacity Block away from 30 minutes before its end: be gone ten minutes earlier.
resource "aws_autoscaling_schedule" "block_ends" {
  count                  = var.capacity_block == null ? 0 : 1
  scheduled_action_name  = "capacity-block-ends"
  autoscaling_group_name = aws_autoscaling_group.gpu.name
  start_time             = timeadd(var.capacity_block.end_time, "-40m")
  min_size               = 0
  max_size               = 0
  desired_capacity       = 0
}
