"""The format of rule tables: grammar, vocabulary, reader and writer, errata, the user's own."""
