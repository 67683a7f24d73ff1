// Decodes batches and heads of frames for tests/spark/columnar_fuzz.py: the JVM's decoder beside Python's.
//
// stdin: `i32 bytes that a body may decode to | i32 size | batch`, again and again; with 0 for the first
// number, the head of a frame in place of the batch.
// stdout: for each, `i32 size | rows`, or -1 if it was refused.  A row is its offset and timestamp (i64),
// key and value (i32 length, -1 = null, bytes), and the number of headers (-1 = null) with their keys and
// values.  A head has for each position its id, next offset, payload's size, whether it is dense, the
// number of aborted transactions, and three numbers for each (all i64).  All numbers are big endian.
package pk.reader;

import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.io.IOException;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;

public final class DecoderPeer {
  private static final StructType PAIR =
      new StructType(new StructField[] {
        DataTypes.createStructField("key", DataTypes.StringType, true),
        DataTypes.createStructField("value", DataTypes.BinaryType, true)
      });

  public static void main(String[] arguments) throws IOException {
    DataInputStream in = new DataInputStream(new BufferedInputStream(System.in, 1 << 16));
    DataOutputStream out = new DataOutputStream(new BufferedOutputStream(System.out, 1 << 16));
    while (true) {
      int most;
      try {
        most = in.readInt();
      } catch (EOFException end) {
        return;
      }
      byte[] batch = new byte[in.readInt()];
      in.readFully(batch);
      byte[] rows = null;
      try {
        rows = most == 0 ? parts(batch) : rows(batch, most);
      } catch (IOException | RuntimeException refused) {
        // what a task does: Python reads the batch and says what is wrong
      }
      out.writeInt(rows == null ? -1 : rows.length);
      if (rows != null) {
        out.write(rows);
      }
      if (in.available() == 0) {
        out.flush();
      }
    }
  }

  private static byte[] parts(byte[] head) throws IOException {
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    DataOutputStream out = new DataOutputStream(bytes);
    for (FetchReply.Part each : new FetchReply(head, 0, head.length).parts) {
      out.writeLong(each.positionId);
      out.writeLong(each.nextOffset);
      out.writeLong(each.payloadBytes);
      out.writeLong(each.dense ? 1 : 0);
      out.writeLong(each.aborted.size());
      for (long[] one : each.aborted) {
        for (long number : one) {
          out.writeLong(number);
        }
      }
    }
    return bytes.toByteArray();
  }

  private static byte[] rows(byte[] batch, int most) throws IOException {
    BatchHeader header = new BatchHeader(batch, 0, batch.length);
    if (header.length != batch.length) {
      throw new IOException("bytes behind the batch");
    }
    header.verify();
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    if (header.count == 0) {
      return bytes.toByteArray();
    }
    BatchBody body = new BatchBody(header, most);
    int count = header.count;
    ColumnVector offsets = body.column("offset", DataTypes.LongType, 0, count);
    ColumnVector times = body.column("timestamp", DataTypes.TimestampType, 0, count);
    ColumnVector keys = body.column("key", DataTypes.BinaryType, 0, count);
    ColumnVector values = body.column("value", DataTypes.BinaryType, 0, count);
    ColumnVector headers =
        body.column("headers", DataTypes.createArrayType(PAIR), 0, count);
    DataOutputStream out = new DataOutputStream(bytes);
    for (int row = 0; row < count; row++) {
      out.writeLong(offsets.getLong(row));
      out.writeLong(times.getLong(row));
      write(out, keys.isNullAt(row) ? null : keys.getBinary(row));
      write(out, values.isNullAt(row) ? null : values.getBinary(row));
      ColumnarArray pairs = headers.isNullAt(row) ? null : headers.getArray(row);
      out.writeInt(pairs == null ? -1 : pairs.numElements());
      for (int n = 0; pairs != null && n < pairs.numElements(); n++) {
        write(out, pairs.getStruct(n, 2).getUTF8String(0).getBytes());
        write(out, pairs.getStruct(n, 2).getBinary(1));
      }
    }
    return bytes.toByteArray();
  }

  private static void write(DataOutputStream out, byte[] value) throws IOException {
    out.writeInt(value == null ? -1 : value.length);
    if (value != null) {
      out.write(value);
    }
  }

  private DecoderPeer() {}
}
