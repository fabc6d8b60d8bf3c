"""Models whose sequences are sharded: support, attention modules, verification."""
