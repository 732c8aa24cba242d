"""Files of a model.

    pretrained                 exported folders: config.json, weights, tokenizer
    distributed_checkpoint     checkpoints of our training, read without trusting them
    checkpoint                 a checkpoint of either kind, opened with its tokenizer
    model_card                 README.md of an exported folder

Imports interdomain.model, data and folders; neither TorchTitan nor Megatron.
"""
