"""What concerns ranks: their context and devices, the process group, collectives, the hardware check, heartbeats."""
