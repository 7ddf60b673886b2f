"""What the CPU can do: detected, capped, and proven where a flag is not permission."""
