"""Observability: throughput, memory, the metrics file, the loss curve, the header and the step line."""
