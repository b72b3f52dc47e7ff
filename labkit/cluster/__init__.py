"""Where one machine ends: the same training on the nodes of a cluster.

slurm.py               an Experiment as an sbatch file
slurm_namespaces.py    a real Slurm of several nodes on this machine
network_namespaces.py  nodes as network namespaces, joined by links of a chosen speed
kubernetes.py          an Experiment as Kubernetes objects
kubernetes_rules.py    a line for each mistake in such objects
kubernetes_objects.py  reads them: pods, containers, quantities
placement.py           which nodes a job gets: an inventory, and policies
job_queue.py           jobs that wait for nodes: gangs, backfill, preemption, failures
job_trace.py           gangs with the sizes and run times of published clusters

labkit.run starts ranks on these nodes: launch(..., nodes=2), launch(..., nodes=2, on="slurm").
"""
