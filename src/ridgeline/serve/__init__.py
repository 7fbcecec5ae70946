"""HTTP: the edge, answers in five dialects, deadlines, batches and the pages, over one engine."""
