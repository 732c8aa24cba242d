"""Checkpoints of training and exported models, on disk.

    step_folder             checkpoint folders: their names, which are complete, and their records
    index                   the index and the tensors of a checkpoint, read without trusting them
    training_checkpoint     one checkpoint, opened with its tokenizer
    run_folder              a run's folder: its checkpoints and its TensorBoard events
    event_files             TensorBoard's event files
    pretrained              exported models: weights, tokenizer and config.json
    config_json             the model's settings as config.json has them
    model_code              the Python files of an exported model
    model_card              README.md of an exported model

Imports interdomain.model, data and folders; neither TorchTitan nor Megatron.
"""
