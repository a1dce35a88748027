// A pretend accelerator for tests: a device of Paddle's custom-device interface whose memory is the host's.
//
// Paddle's wheel carries such a device for its own tests, `fake_cpu_device.h`. tests/device/build.py includes it here under
// the name `device.h`, with a name and a size of memory that a training needs; below is what else it lacks.

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "device.h"
#include "kernels.h"

namespace {

// Paddle's own device leaves the handle unset, and Paddle then works with whatever stood there. Everything here is done when
// a call returns, so one handle serves all streams, and one all events.
char stream_handle;
char event_handle;

C_Status create_stream(const C_Device, C_Stream* stream) {
  *stream = reinterpret_cast<C_Stream>(&stream_handle);
  return C_SUCCESS;
}

C_Status create_event(const C_Device, C_Event* event) {
  *event = reinterpret_cast<C_Event>(&event_handle);
  return C_SUCCESS;
}

}  // namespace

// Paddle calls it once, when it loads the libraries of CUSTOM_DEVICE_ROOT.
extern "C" __attribute__((visibility("default"))) void InitPlugin(CustomRuntimeParams* params) {
  InitFakeCPUDevice(params);
  params->interface->create_stream = create_stream;
  params->interface->create_event = create_event;
  pretend_device::add_kernels(DEVICE_TYPE);
  pretend_device::add_optimizers(DEVICE_TYPE);
}
