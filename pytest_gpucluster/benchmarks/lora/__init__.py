"""Fine-tuning with LoRA: the conversations it learns from, and what an adapter has learned of them."""
