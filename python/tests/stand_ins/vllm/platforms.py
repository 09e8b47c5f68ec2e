from types import SimpleNamespace


class NvmlCudaPlatform:
    capability = (9, 0)

    def is_cuda(self) -> bool:
        return True

    def get_device_capability(self):
        return self.capability and SimpleNamespace(major=self.capability[0],
                                                   minor=self.capability[1])


current_platform = NvmlCudaPlatform()
