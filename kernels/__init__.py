"""Every kernel x86quant can route to: one folder a provider, collected here."""
