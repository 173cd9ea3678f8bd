variable "name" {
  description = "Of the cluster and everything around it."
  type        = string
  default     = "ridethrough"
}

variable "region" {
  type    = string
  default = "us-east-1"
}

variable "zones" {
  description = "Two zones for the control plane. GPUs and file system share the first: a placement group has one zone, and Lustre across zones is slow and billed."
  type        = list(string)
  default     = ["us-east-1a", "us-east-1b"]

  validation {
    condition     = length(var.zones) >= 2
    error_message = "EKS needs subnets in two zones."
  }
}

variable "kubernetes_version" {
  description = "1.30 at least: Jobs with podReplacementPolicy and JobSet's failure policies."
  type        = string
  default     = "1.33"
}

variable "api_access_cidrs" {
  description = "Addresses that may reach the cluster's API. Your own, with /32."
  type        = list(string)

  validation {
    condition     = !contains(var.api_access_cidrs, "0.0.0.0/0")
    error_message = "Give your own address with /32, not the whole internet."
  }
}

variable "gpu" {
  description = "The training nodes. efa_cards: network cards with EFA (p5.48xlarge 32, p4de.24xlarge 4, none on g5 here)."
  type = object({
    instance_type = string
    efa_cards     = number
    max_nodes     = number
    disk_gib      = number
  })
  default = {
    instance_type = "p5.48xlarge"
    efa_cards     = 32
    max_nodes     = 3
    disk_gib      = 500
  }
}

variable "capacity_block" {
  description = "A Capacity Block for ML: its reservation and its end (RFC 3339). Null: on demand."
  type = object({
    reservation_id = string
    end_time       = string
  })
  default = null
}

variable "lustre" {
  description = "Scratch file system: 1200 GB, 2400, or a multiple of 2400."
  type = object({
    size_gb    = number
    deployment = string
  })
  default = {
    size_gb    = 1200
    deployment = "SCRATCH_2"
  }

  validation {
    condition     = var.lustre.size_gb == 1200 || var.lustre.size_gb % 2400 == 0
    error_message = "FSx for Lustre on SSD has 1200 GB, 2400 GB, or a multiple of 2400 GB."
  }
}
