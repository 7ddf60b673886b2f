"""Selection rules as data: one TOML file a table. ``x86quant.tables.table_reader`` reads them."""
