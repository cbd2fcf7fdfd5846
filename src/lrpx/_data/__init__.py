"""The benchmarks' data: sentences with a ground truth, and the same as one model's tokenizer reads them."""
