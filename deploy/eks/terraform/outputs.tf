output "kubeconfig" {
  description = "Makes kubectl and ridethrough k8s talk to the cluster."
  value       = "aws eks update-kubeconfig --region ${var.region} --name ${aws_eks_cluster.main.name}"
}

output "registry" {
  value = aws_ecr_repository.images.repository_url
}

output "gpu_group" {
  description = "Name of the training nodes' auto scaling group."
  value       = aws_autoscaling_group.gpu.name
}

output "storage" {
  description = "The part `storage:` of a job file."
  value = yamlencode({
    storage = {
      fsx = {
        file_system_id = aws_fsx_lustre_file_system.shared.id
        dns_name       = aws_fsx_lustre_file_system.shared.dns_name
        mount_name     = aws_fsx_lustre_file_system.shared.mount_name
        size           = "${var.lustre.size_gb}Gi"
      }
      write_gb_s = var.lustre.size_gb / 5000
    }
  })
}
