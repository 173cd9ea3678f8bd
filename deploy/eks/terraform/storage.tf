# Lustre's ports, between the file system and the nodes, and within the file system.
resource "aws_security_group" "lustre" {
  name        = "${var.name}-lustre"
  description = "FSx for Lustre"
  vpc_id      = aws_vpc.main.id
}

locals {
  lustre_sources = {
    nodes = aws_eks_cluster.main.vpc_config[0].cluster_security_group_id
    self  = aws_security_group.lustre.id
  }
}

resource "aws_vpc_security_group_ingress_rule" "lustre" {
  for_each                     = local.lustre_sources
  security_group_id            = aws_security_group.lustre.id
  referenced_security_group_id = each.value
  ip_protocol                  = "tcp"
  from_port                    = 988
  to_port                      = 988
}

resource "aws_vpc_security_group_ingress_rule" "lustre_clients" {
  for_each                     = local.lustre_sources
  security_group_id            = aws_security_group.lustre.id
  referenced_security_group_id = each.value
  ip_protocol                  = "tcp"
  from_port                    = 1018
  to_port                      = 1023
}

resource "aws_vpc_security_group_egress_rule" "lustre" {
  security_group_id = aws_security_group.lustre.id
  cidr_ipv4         = aws_vpc.main.cidr_block
  ip_protocol       = "-1"
}

# Scratch: fast, cheap, one copy. Results that matter are collected before it is deleted.
resource "aws_fsx_lustre_file_system" "shared" {
  storage_capacity         = var.lustre.size_gb
  deployment_type          = var.lustre.deployment
  storage_type             = "SSD"
  file_system_type_version = "2.15"
  data_compression_type    = "NONE"
  subnet_ids               = [aws_subnet.private[0].id]
  security_group_ids       = [aws_security_group.lustre.id]

  tags = { Name = var.name }
}

resource "aws_ecr_repository" "images" {
  name                 = var.name
  image_tag_mutability = "IMMUTABLE"
  force_delete         = true

  image_scanning_configuration {
    scan_on_push = true
  }
}

resource "aws_ecr_lifecycle_policy" "images" {
  repository = aws_ecr_repository.images.name
  policy = jsonencode({
    rules = [{
      rulePriority = 1
      description  = "Untagged images go after a week."
      selection    = { tagStatus = "untagged", countType = "sinceImagePushed", countUnit = "days", countNumber = 7 }
      action       = { type = "expire" }
    }]
  })
}
