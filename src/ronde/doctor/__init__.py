"""Why are my devices idle? Synthetic speed against real speed, the gap by stage, and a
prescription.

Offers :func:`~ronde.doctor.doctor.doctor`; the verdict is arithmetic over measured rates, the
prescriptions are settings that can be applied and verified.
"""
