"""What stands around the loop. In reading order:

files         whole or not at all: writing files, reading JSON
distributed   several devices
stop          Ctrl-C ends a run after its step
loading       a model folder or hub id -> a policy that is tried before it is trusted
precision     number formats, optimisers, LoRA
memory        will it fit?
run_folder    what a run leaves behind, and who may write it
curves        metrics -> a picture
metrics       what is measured while training
tracker       metrics -> tensorboard, wandb, trackio
checkpoint    save and resume, bit for bit
session       the state that steps change, and the run around it
prepare       what a run starts from
"""
