"""Where records come from; one module a source, all with the interface of data.sources.base."""
