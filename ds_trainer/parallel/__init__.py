"""Where every rank stands, and which samples it holds: pure arithmetic, no process group."""
