"""The models of the tasks, each a plain torch.nn.Module that takes the data as it is stored."""
