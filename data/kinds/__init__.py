"""What a record becomes: one module a kind of document, with the interface of data.kinds.base."""
