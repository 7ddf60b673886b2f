"""Selection rules as data: one TOML file a table. ``x86quant.rule_table`` reads them."""
