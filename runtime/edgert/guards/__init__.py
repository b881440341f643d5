"""Guards: what the device says about itself, and what the engine does about it.

readings   one frozen reading and the protocol of whatever takes it
jetson     thermal zones, nvpmodel, INA rails, MemAvailable of an NVIDIA Jetson
nvml       an NVIDIA GPU through nvidia-ml-py, else one answer of nvidia-smi
detect     which of them this machine has
policy     readings → active slots and admission; pure
guard      the clockwork between the two that the worker asks before it admits
"""
